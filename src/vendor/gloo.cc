/* Collectives between CPU ranks by Gloo over TCP. Gloo moves the bytes; sums are taken here, in the order of ranks, so that
 * they have the bits of one rank that adds the same parts: its own reductions add in an order that depends on the world. */
#include "base/bf16.h"
#include "base/fail.h"
#include "base/memory.h"
#include "dist/comm_impl.h"
#include "dist/group.h"

#include <gloo/allgather.h>
#include <gloo/alltoall.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

/* Gloo writes to sockets with plain writev, and a peer that is gone must be an error, not a signal: while Gloo has the thread, and
 * in the threads that it makes, SIGPIPE is blocked; one that came is taken away. */
class without_sigpipe {
    sigset_t before, pipe;
    bool was_pending;

public:
    without_sigpipe()
    {
        sigset_t pending;
        sigemptyset(&pipe);
        sigaddset(&pipe, SIGPIPE);
        sigpending(&pending);
        was_pending = sigismember(&pending, SIGPIPE) == 1;
        pthread_sigmask(SIG_BLOCK, &pipe, &before);
    }
    ~without_sigpipe()
    {
        const timespec now = {0, 0};
        while (!was_pending && sigtimedwait(&pipe, nullptr, &now) == SIGPIPE)
            ;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    without_sigpipe(const without_sigpipe &) = delete;
    without_sigpipe &operator=(const without_sigpipe &) = delete;
};

struct group_failed : std::runtime_error {
    vla_error error;
    explicit group_failed(const vla_error &e) : std::runtime_error(e.message), error(e) {}
};

/* The ranks' addresses, through the group. Keeps those that it saw, to name a peer by its rank later. */
class meeting final : public gloo::rendezvous::Store {
    vlai_group *group;
    std::string prefix;
    std::vector<std::string> &peers;

public:
    meeting(vlai_group *g, std::string p, std::vector<std::string> &addresses) : group(g), prefix(std::move(p)), peers(addresses) {}

    void set(const std::string &key, const std::vector<char> &data) override
    {
        vla_error err = VLA_ERROR_INIT;
        if (vlai_group_set(group, (prefix + key).c_str(), data.data(), data.size(), &err) != VLA_OK)
            throw group_failed(err);
    }

    std::vector<char> get(const std::string &key) override
    {
        vla_error err = VLA_ERROR_INIT;
        void *data = nullptr;
        size_t size = 0;
        if (vlai_group_get(group, (prefix + key).c_str(), 0, &data, &size, &err) != VLA_OK)
            throw group_failed(err);
        std::unique_ptr<void, void (*)(void *)> owner(data, vlai_free);
        std::vector<char> bytes(static_cast<char *>(data), static_cast<char *>(data) + size);
        see(key, bytes);
        return bytes;
    }

    void wait(const std::vector<std::string> &keys) override
    {
        for (const std::string &key : keys)
            get(key);
    }

    void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &) override
    {
        wait(keys);
    }

private:
    /* Under the key of a rank's number stand its addresses, one for each other rank. */
    void see(const std::string &key, const std::vector<char> &all)
    {
        size_t others = peers.size() - 1, me = static_cast<size_t>(vlai_group_rank(group));
        if (key.empty() || key.find_first_not_of("0123456789") != std::string::npos || all.size() % others)
            return;
        size_t from = std::strtoul(key.c_str(), nullptr, 10), size = all.size() / others;
        if (from >= peers.size() || from == me)
            return;
        const char *first = all.data() + (me > from ? me - 1 : me) * size;
        peers[from] = gloo::transport::tcp::Address(std::vector<char>(first, first + size)).str();
    }
};

class mesh final : public gloo::rendezvous::Context {
public:
    using gloo::rendezvous::Context::Context;

    /* Everybody who waits on this context returns with an error. */
    void fail(const std::string &why)
    {
        using tcp = gloo::transport::tcp::Context;
        struct opened : tcp {
            using tcp::signalException;
        };
        (static_cast<tcp *>(transportContext_.get())->*&opened::signalException)(why);
    }
};

struct ring {
    std::shared_ptr<mesh> context;
    std::vector<std::string> peers; /* addresses by rank, as Gloo's messages show them */
    std::vector<std::string> hosts;
    double limit;
};

/* Gloo's sentence without its source line, and with the rank whose address it names. */
vla_status failed(const ring *r, const char *what, const std::exception &e, vla_error *err)
{
    std::string text = e.what();
    if (text.rfind("[", 0) == 0 && text.find("] ") != std::string::npos)
        text.erase(0, text.find("] ") + 2);
    for (size_t i = 0; i < r->peers.size(); i++)
        if (!r->peers[i].empty() && text.find(r->peers[i]) != std::string::npos)
            return vlai_fail(err, VLA_E_NCCL, "%s: rank %zu (host %s): %s", what, i, r->hosts[i].c_str(), text.c_str());
    if (text.find("Timed out") != std::string::npos || text.find("timeout") != std::string::npos)
        return vlai_fail(err, VLA_E_NCCL, "%s: a rank did not take part within %g s (%s)", what, r->limit, text.c_str());
    return vlai_fail(err, VLA_E_NCCL, "%s: Gloo: %s", what, text.c_str());
}

template <class F> vla_status guarded(const ring *r, const char *what, vla_error *err, F f)
{
    without_sigpipe quiet;
    try {
        f();
        return VLA_OK;
    } catch (const group_failed &e) {
        if (err)
            *err = e.error;
        return e.error.status;
    } catch (const std::bad_alloc &) {
        return vlai_fail(err, VLA_E_NOMEM, "%s: out of host memory", what);
    } catch (const std::exception &e) {
        return failed(r, what, e, err);
    }
}

/* The address of this host on the way to another one; empty when that cannot be told. */
std::string address_towards(const char *host)
{
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_DGRAM;
    std::string result;
    if (getaddrinfo(host, "9", &hints, &found))
        return result;
    for (addrinfo *a = found; a && result.empty(); a = a->ai_next) {
        sockaddr_storage own = {};
        socklen_t size = sizeof own;
        char text[NI_MAXHOST];
        int fd = socket(a->ai_family, SOCK_DGRAM, 0); /* connecting it sends nothing, but chooses the route */
        if (fd >= 0 && !connect(fd, a->ai_addr, a->ai_addrlen) && !getsockname(fd, reinterpret_cast<sockaddr *>(&own), &size) &&
            !getnameinfo(reinterpret_cast<sockaddr *>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST))
            result = text;
        if (fd >= 0)
            close(fd);
    }
    freeaddrinfo(found);
    return result;
}

/* Where this rank listens: at the interface that GLOO_SOCKET_IFNAME names; on one host the loopback; else where another host is
 * reached from. */
gloo::transport::tcp::attr place(const vlai_group *group, const std::vector<std::string> &hosts)
{
    gloo::transport::tcp::attr attr;
    const char *name = std::getenv("GLOO_SOCKET_IFNAME");
    if (name && *name) {
        attr.iface = name;
        return attr;
    }
    const std::string &own = hosts[static_cast<size_t>(vlai_group_rank(group))];
    attr.hostname = "127.0.0.1";
    for (const std::string &host : hosts)
        if (host != own)
            return attr.hostname = address_towards(host.c_str()), attr; /* empty: Gloo takes what this host's name stands for */
    return attr;
}

enum { BLOCK = 4096 };

/* out[i] = parts[0][i] + parts[1][i] + ..., in Sum, rounded once. `out` may be one of the parts. */
template <class T, class Sum, class Widen, class Narrow>
void sum_parts(const void *parts, int world, int64_t n, void *out, Widen widen, Narrow narrow)
{
    Sum sum[BLOCK];
    for (int64_t first = 0; first < n; first += BLOCK) {
        int64_t count = n - first < BLOCK ? n - first : static_cast<int64_t>(BLOCK);
        for (int r = 0; r < world; r++) {
            const T *part = static_cast<const T *>(parts) + r * n + first;
            for (int64_t i = 0; i < count; i++)
                sum[i] = r ? sum[i] + widen(part[i]) : widen(part[i]);
        }
        for (int64_t i = 0; i < count; i++)
            static_cast<T *>(out)[first + i] = narrow(sum[i]);
    }
}

template <class T> void sum_plain(const void *parts, int world, int64_t n, void *out)
{
    auto same = [](T x) { return x; };
    sum_parts<T, T>(parts, world, n, out, same, same);
}

void sum(const void *parts, int world, int64_t n, vla_dtype dtype, void *out)
{
    switch (dtype) {
    case VLA_BF16: return sum_parts<uint16_t, float>(parts, world, n, out, vlai_bf16_to_float, vlai_bf16_from_float);
    case VLA_F32: return sum_plain<float>(parts, world, n, out);
    case VLA_F64: return sum_plain<double>(parts, world, n, out);
    case VLA_I32: return sum_plain<uint32_t>(parts, world, n, out);
    case VLA_I64: return sum_plain<uint64_t>(parts, world, n, out);
    default: throw std::invalid_argument(std::string("no sum of ") + vla_dtype_name(dtype));
    }
}

void exchange(const ring *r, const void *in, void *out, size_t bytes)
{
    gloo::AlltoallOptions options(r->context);
    options.setInput(static_cast<char *>(const_cast<void *>(in)), bytes);
    options.setOutput(static_cast<char *>(out), bytes);
    gloo::alltoall(options);
}

void gather(const ring *r, void *data, size_t bytes)
{
    gloo::AllgatherOptions options(r->context);
    options.setOutput(static_cast<char *>(data), bytes);
    gloo::allgather(options);
}

void gloo_close(void *state)
{
    without_sigpipe quiet;
    delete static_cast<ring *>(state);
}

vla_status gloo_reduce_scatter(void *state, const void *in, void *out, int64_t n, vla_dtype dtype, void *scratch, void *, vla_error *err)
{
    const ring *r = static_cast<ring *>(state);
    return guarded(r, "reduce_scatter", err, [&] {
        exchange(r, in, scratch, static_cast<size_t>(n * r->context->size) * vla_dtype_size(dtype));
        sum(scratch, r->context->size, n, dtype, out);
    });
}

vla_status gloo_all_gather(void *state, void *data, int64_t n, vla_dtype dtype, void *, vla_error *err)
{
    const ring *r = static_cast<ring *>(state);
    return guarded(r, "all_gather", err, [&] { gather(r, data, static_cast<size_t>(n * r->context->size) * vla_dtype_size(dtype)); });
}

/* Every rank sums one part, and the sums are gathered: padded to parts of one size in the first half of the scratch. */
vla_status gloo_all_reduce(void *state, void *data, int64_t n, vla_dtype dtype, void *scratch, void *, vla_error *err)
{
    const ring *r = static_cast<ring *>(state);
    return guarded(r, "all_reduce", err, [&] {
        int world = r->context->size;
        size_t size = vla_dtype_size(dtype), bytes = static_cast<size_t>(n) * size;
        int64_t part = (n + world - 1) / world;
        size_t whole = static_cast<size_t>(part * world) * size;
        char *mine = static_cast<char *>(scratch), *others = mine + vlai_comm_scratch(n, dtype, world);
        std::memcpy(mine, data, bytes);
        std::memset(mine + bytes, 0, whole - bytes);
        exchange(r, mine, others, whole);
        sum(others, world, part, dtype, mine + static_cast<size_t>(part * r->context->rank) * size);
        gather(r, mine, whole);
        std::memcpy(data, mine, bytes);
    });
}

void gloo_abort(void *state)
{
    without_sigpipe quiet;
    try {
        static_cast<ring *>(state)->context->fail("ended on request");
    } catch (const std::exception &) {
        /* A context that has failed already is ended. */
    }
}

} // namespace

const vlai_transport vlai_gloo = {gloo_close, gloo_reduce_scatter, gloo_all_gather, gloo_all_reduce, nullptr, gloo_abort};

vla_status vlai_gloo_open(vlai_group *group, double limit, void **state, vla_error *err)
{
    static std::atomic<int> opened; /* every rank opens the same communicators, so that the number names one of them */
    int world = vlai_group_world(group);
    *state = nullptr;
    std::unique_ptr<ring> r(new (std::nothrow) ring{nullptr, {}, {}, limit});
    if (!r)
        return vlai_nomem(err, sizeof *r);
    VLA_TRY(guarded(r.get(), "connecting the ranks", err, [&] {
        r->peers.resize(static_cast<size_t>(world));
        for (int i = 0; i < world; i++)
            r->hosts.emplace_back(vlai_group_host(group, i));
        auto device = gloo::transport::tcp::CreateDevice(place(group, r->hosts));
        r->context = std::make_shared<mesh>(vlai_group_rank(group), world);
        r->context->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(limit * 1e3)));
        meeting store(group, "gloo/" + std::to_string(opened++) + "/", r->peers);
        r->context->connectFullMesh(store, device);
    }));
    *state = r.release();
    return VLA_OK;
}
