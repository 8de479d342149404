#include "train/device.h"

#include "base/fail.h"
#include "exec/executor.h"
#include "exec/plan.h"
#include "exec/store.h"
#ifdef VLA_CUDA
#include "exec/schedule.h"
#include "kernels/cuda.h"
#include "kernels/device.h"
#endif

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int vlai_gpu_count(void)
{
#ifdef VLA_CUDA
    int count = 0;
    return vlai_device_count(&count) == 0 ? count : 0;
#else
    return 0;
#endif
}

vla_status vlai_device_choose(const char *wanted, char out[VLAI_DEVICE_NAME], vla_error *err)
{
    const char *name = wanted && *wanted ? wanted : "auto";
    bool number = !strncmp(name, "cuda:", 5) && name[5] && strspn(name + 5, "0123456789") == strlen(name + 5) && strlen(name) < 9;
    if (!strcmp(name, "auto"))
        name = vlai_gpu_count() > 0 ? "cuda" : "cpu";
    else if (strcmp(name, "cpu") != 0 && strcmp(name, "cuda") != 0 && !number)
        return vlai_fail(err, VLA_E_INVALID, "training.device is '%s', wanted cpu, cuda, cuda:N or auto", name);
    snprintf(out, VLAI_DEVICE_NAME, "%s", name);
    return VLA_OK;
}

vla_status vlai_device_of_rank(const char *wanted, int local_rank, int local_world, char out[VLAI_DEVICE_NAME], vla_error *err)
{
    VLA_TRY(vlai_device_choose(wanted, out, err));
    if (local_world == 1 || !strcmp(out, "cpu"))
        return VLA_OK;
    if (out[4] == ':')
        return vlai_fail_hint(err, VLA_E_INVALID, "leave it at auto: rank i of a machine takes its GPU i; CUDA_VISIBLE_DEVICES chooses among them",
                              "training.device is %s for %d ranks of this machine", out, local_world);
    int count = vlai_gpu_count();
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (count == 1 && visible && *visible)
        local_rank = 0;
    else if (count > 0 && local_rank >= count)
        return vlai_fail_hint(err, VLA_E_INVALID, "start as many ranks as the machine has GPUs, or train with --device cpu",
                              "local rank %d of %d has no GPU of its own: this machine shows %d", local_rank, local_world, count);
    snprintf(out, VLAI_DEVICE_NAME, "cuda:%d", local_rank);
    return VLA_OK;
}

size_t vlai_store_held(const vla_store *store)
{
    size_t total = 0;
    for (int k = 0; k < VLA_STORE_KINDS; k++)
        total += store->bytes[k];
    return total;
}

vlai_plan_need vlai_plan_needs(const vla_executor *ex, const vla_plan *plan)
{
    vlai_plan_need need = {.arena = plan->memory.arena_bytes};
#ifdef VLA_CUDA
    if (ex->backend == &vlai_backend_cuda) { /* as the executor reserves */
        size_t scratch = 0, lanes = plan->options.fast & VLA_FAST_LANES ? VLAI_LANE_COMM : 1;
        for (size_t n = 0; n < plan->graph->n_nodes; n++) {
            size_t bytes = vlai_cuda_workspaces[plan->graph->nodes[n].op](plan->graph, &plan->graph->nodes[n]);
            scratch = bytes > scratch ? bytes : scratch;
        }
        need.scratch = lanes * scratch + 2 * plan->memory.input_bytes;
        return need;
    }
#endif
    need.scratch = plan->workspace + plan->widen + plan->workspace_per_thread * (size_t)ex->threads;
    return need;
}

size_t vlai_device_keep(vla_recompute mode, vla_numerics numerics, size_t wanted, size_t room, size_t need, size_t arena)
{
    bool leaves_free = mode == VLA_RECOMPUTE_CHEAP && (numerics == VLA_BF16_SR || numerics == VLA_BF16_PLAIN);
    if (mode == VLA_RECOMPUTE_NONE)
        return 0;
    if (room == SIZE_MAX || (!wanted && leaves_free))
        return wanted;
    size_t margin = arena / 16 + room / 64, spare = room <= need || room - need <= margin ? 0 : room - need - margin;
    return wanted && wanted < spare ? wanted : spare;
}

size_t vlai_device_room(const vla_executor *ex, size_t limit, size_t held)
{
    size_t room = limit ? limit : SIZE_MAX;
#ifdef VLA_CUDA
    size_t have, total, tables = (size_t)64 << 20; /* of the update, per plan; they count against the limit too */
    if (ex->backend == &vlai_backend_cuda && limit > tables)
        room = limit - tables;
    if (ex->backend == &vlai_backend_cuda && vlai_device_memory(&have, &total) == 0) {
        have += ex->arena_bytes + ex->workspace_bytes; /* they make way */
        have = have > VLAI_DEVICE_SPARE ? have - VLAI_DEVICE_SPARE : 0;
        room = held + have < room ? held + have : room;
    }
#endif
    (void)ex;
    (void)held;
    return room;
}
