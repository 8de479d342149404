/* A model of one's own on libvla: defined as a graph, trained by the trainer, saved as a weights file, used for predictions.
 *
 * It learns to steer: from the position of an arm and of a goal (4 numbers) to the action that goes half of the way (2
 * numbers), with a gripper command (1) that closes when the goal is near.
 *
 *     cmake -S examples -B build-examples -DCMAKE_PREFIX_PATH=/where/vla/was/installed
 *     cmake --build build-examples
 *     build-examples/custom_model run        # run/metrics.jsonl, run/<epoch>_<step>/, run/steer.safetensors
 *
 * Starting it again with the same folder goes on from its checkpoint. */
#include <vla/vla.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 4, HIDDEN = 64, OUT = 3, SAMPLES = 4096, BATCH = 32, STEPS = 400 };

/* ---- samples: drawn from their position alone, so that every run sees the same ---- */

typedef struct {
    float x[IN], y[OUT];
} sample;

/* A well mixed 64-bit number (the finaliser of SplitMix64) as a real in [-1, 1). */
static float draw(uint64_t position, uint64_t k)
{
    uint64_t z = position * 0x9E3779B97F4A7C15u + (k + 1) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (float)(z >> 40) / (float)(1 << 23) - 1.0f;
}

static vla_status slot_create(void *user, void **slot, vla_error *err)
{
    (void)user;
    *slot = calloc(1, sizeof(sample));
    if (*slot)
        return VLA_OK;
    err->status = VLA_E_NOMEM;
    return VLA_E_NOMEM;
}

static void slot_destroy(void *user, void *slot)
{
    (void)user;
    free(slot);
}

static void make_sample(uint64_t position, sample *s)
{
    for (int i = 0; i < IN; i++)
        s->x[i] = draw(position, (uint64_t)i);
    float dx = s->x[2] - s->x[0], dy = s->x[3] - s->x[1];
    s->y[0] = 0.5f * dx;
    s->y[1] = 0.5f * dy;
    s->y[2] = dx * dx + dy * dy < 0.5f ? 1.0f : -1.0f;
}

static vla_status read_sample(void *user, void *worker, const vla_sample_key *key, void *slot, vla_error *err)
{
    (void)user;
    (void)worker;
    (void)err;
    /* Validation draws lie behind all that training draws. */
    make_sample(key->position + (key->stream == VLA_SAMPLES_VALIDATION ? (uint64_t)1 << 40 : 0), slot);
    return VLA_OK;
}

static vla_samples samples_of(int64_t count)
{
    return (vla_samples){.size = sizeof(vla_samples), .count = count, .slot_create = slot_create,
                         .slot_destroy = slot_destroy, .read = read_sample};
}

/* ---- the model: two layers ---- */

typedef struct {
    int64_t rows;
} shape;

static vla_status params(void *user, vla_store *store, vla_error *err)
{
    static const struct {
        const char *name;
        int rank;
        int64_t shape[2];
    } rows[] = {{"in.weight", 2, {HIDDEN, IN}}, {"in.bias", 1, {HIDDEN}}, {"out.weight", 2, {OUT, HIDDEN}}, {"out.bias", 1, {OUT}}};
    (void)user;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        vla_status status = vla_store_add(store, rows[i].name, VLA_COMPUTE, rows[i].rank, rows[i].shape, 0, err);
        if (status != VLA_OK)
            return status;
    }
    return VLA_OK;
}

static vla_status init(void *user, vla_store *store, vla_error *err)
{
    (void)user;
    (void)err;
    for (size_t i = 0; i < vla_store_count(store); i++) {
        vla_tensor w = vla_store_tensor(store, VLA_STORE_WEIGHT, i);
        float scale = w.rank == 2 ? 1.0f / sqrtf((float)w.shape[1]) : 0.0f;
        for (int64_t k = 0; k < w.elements; k++) {
            float value = scale * draw(1000 + i, (uint64_t)k);
            vla_store_set_float(store, i, k, 1, &value);
        }
    }
    return VLA_OK;
}

static vla_status shape_of(void *user, void *const *slots, int64_t count, void *out, vla_error *err)
{
    (void)user;
    (void)slots;
    (void)err;
    ((shape *)out)->rows = count;
    return VLA_OK;
}

static vla_value network(vla_graph *g, int64_t rows)
{
    vla_value x = vla_graph_input(g, "x", VLA_COMPUTE, 2, (int64_t[]){rows, IN});
    vla_value w1 = vla_graph_param(g, "in.weight", VLA_COMPUTE, 2, (int64_t[]){HIDDEN, IN});
    vla_value b1 = vla_graph_param(g, "in.bias", VLA_COMPUTE, 1, (int64_t[]){HIDDEN});
    vla_value w2 = vla_graph_param(g, "out.weight", VLA_COMPUTE, 2, (int64_t[]){OUT, HIDDEN});
    vla_value b2 = vla_graph_param(g, "out.bias", VLA_COMPUTE, 1, (int64_t[]){OUT});
    return vla_linear(g, vla_silu(g, vla_linear(g, x, w1, b1)), w2, b2);
}

static vla_status build(void *user, const void *of, vla_graph **out, vla_error *err)
{
    int64_t rows = ((const shape *)of)->rows;
    (void)user;
    vla_status status = vla_graph_create(out, err);
    if (status != VLA_OK)
        return status;
    vla_value y = vla_cast(*out, network(*out, rows), VLA_PRECISE);
    vla_value target = vla_graph_input(*out, "target", VLA_PRECISE, 2, (int64_t[]){rows, OUT});
    vla_value mask = vla_fill(*out, VLA_PRECISE, 2, (int64_t[]){rows, OUT}, 1.0);
    vla_graph_name(*out, vla_masked_mse(*out, y, target, mask).loss, "loss");
    return vla_graph_check(*out, err);
}

static vla_status fill(void *user, const void *of, void *const *slots, int64_t count, vla_run *run, vla_error *err)
{
    float *x = vla_run_data(run, "x"), *target = vla_run_data(run, "target");
    (void)user;
    (void)of;
    (void)err;
    for (int64_t i = 0; i < count; i++) {
        memcpy(x + i * IN, ((const sample *)slots[i])->x, IN * sizeof *x);
        memcpy(target + i * OUT, ((const sample *)slots[i])->y, OUT * sizeof *target);
    }
    return VLA_OK;
}

static vla_model steering_model(void)
{
    return (vla_model){.size = sizeof(vla_model), .shape_size = sizeof(shape), .params = params, .init = init,
                       .shape = shape_of, .build = build, .fill = fill};
}

/* ---- use: the weights file in a store of its own, one prediction ---- */

static vla_status predict(const char *weights, const sample *of, float *action, vla_error *err)
{
    vla_store *store = NULL;
    vla_graph *graph = NULL;
    vla_plan *plan = NULL;
    vla_executor *executor = NULL;
    vla_run *run = NULL;
    vla_plan_options options = VLA_PLAN_OPTIONS_DEFAULT;
    vla_status status = vla_store_create(&store, err);
    if (status == VLA_OK)
        status = params(NULL, store, err);
    if (status == VLA_OK)
        status = vla_store_allocate(store, VLA_FP32, VLA_STORE_PREDICT, err);
    if (status == VLA_OK)
        status = vla_store_load(store, weights, err);
    if (status == VLA_OK)
        status = vla_graph_create(&graph, err);
    if (status == VLA_OK) {
        vla_graph_name(graph, network(graph, 1), "action");
        status = vla_plan_build(graph, &options, &plan, err);
    }
    if (status == VLA_OK)
        status = vla_executor_create(1, &executor, err);
    if (status == VLA_OK)
        status = vla_run_create(executor, plan, store, &run, err);
    if (status == VLA_OK) {
        memcpy(vla_run_data(run, "x"), of->x, sizeof of->x);
        status = vla_run_execute(run, err);
    }
    if (status == VLA_OK)
        memcpy(action, vla_run_data(run, "action"), OUT * sizeof *action);
    vla_run_destroy(run);
    vla_executor_destroy(executor);
    vla_plan_destroy(plan);
    vla_store_destroy(store);
    return status;
}

/* ---- the program ---- */

static void show(void *user, const vla_record *r)
{
    (void)user;
    if (r->kind == VLA_RECORD_STEP && r->step % 50 == 0)
        printf("step %lld/%lld  loss %.5f  %.0f samples/s\n", (long long)r->step, (long long)r->steps, r->loss, r->samples_per_second);
    else if (r->kind == VLA_RECORD_VALIDATION)
        printf("step %lld  held-out loss %.5f\n", (long long)r->step, r->loss);
}

static int complain(const vla_error *err)
{
    fprintf(stderr, "custom_model: %s\n", err->message);
    if (*err->hint)
        fprintf(stderr, "  %s\n", err->hint);
    return 1;
}

int main(int argc, char **argv)
{
    static const vla_lr_group groups[] = {{"base", 1e-2}};
    const char *folder = argc > 1 ? argv[1] : "run";
    char weights[4096];
    vla_error err = VLA_ERROR_INIT;
    vla_model model = steering_model();
    vla_samples samples = samples_of(SAMPLES), held_out = samples_of(256);
    vla_trainer_options options = VLA_TRAINER_OPTIONS_DEFAULT;
    options.run = folder;
    options.batch = BATCH;
    options.steps = STEPS;
    options.epochs = 100;
    options.workers = 2;
    options.groups = groups;
    options.group_count = 1;
    options.schedule = VLA_LR_COSINE;
    options.warmup = 20;
    options.save_interval = 100;
    options.epoch_save_interval = 0;
    options.validation_interval = 100;
    options.keep_last = 2;
    options.report = show;

    vla_checkpoint *checkpoint;
    if (vla_checkpoint_open(folder, &checkpoint, &err) == VLA_OK) {
        printf("going on from step %lld\n", (long long)vla_checkpoint_step(checkpoint));
        vla_checkpoint_close(checkpoint);
        options.resume = folder;
    }
    vla_trainer *trainer;
    if (vla_trainer_create(&model, &samples, &held_out, &options, &trainer, &err) != VLA_OK)
        return complain(&err);
    vla_status status = vla_trainer_run(trainer, &err);
    vla_record last;
    if (status == VLA_OK)
        status = vla_trainer_validate(trainer, &last, &err);
    snprintf(weights, sizeof weights, "%s/steer.safetensors", folder);
    if (status == VLA_OK)
        status = vla_store_save(vla_trainer_store(trainer), weights, &err);
    vla_trainer_destroy(trainer);
    if (status != VLA_OK)
        return complain(&err);

    sample of;
    float action[OUT];
    make_sample(123456789, &of);
    if (predict(weights, &of, action, &err) != VLA_OK)
        return complain(&err);
    printf("arm (%.2f, %.2f), goal (%.2f, %.2f): action (%.3f, %.3f), wanted (%.3f, %.3f)\n", of.x[0], of.x[1], of.x[2], of.x[3],
           action[0], action[1], of.y[0], of.y[1]);
    return 0;
}
