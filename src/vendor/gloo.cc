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
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <netdb.h>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
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

/* The ranks' addresses, through the group. */
class meeting final : public gloo::rendezvous::Store {
    vlai_group *group;
    std::string prefix;

public:
    meeting(vlai_group *g, std::string p) : group(g), prefix(std::move(p)) {}

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
        return std::vector<char>(static_cast<char *>(data), static_cast<char *>(data) + size);
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
};

using buffer = gloo::transport::UnboundBuffer;

struct ring {
    std::shared_ptr<gloo::rendezvous::Context> context;
    std::vector<std::string> hosts;
    double limit = 0;
    bool connected = false;
    std::mutex lock; /* of what follows */
    bool ending = false;
    std::vector<buffer *> active; /* of the collective under way */
};

/* Buffers of one collective, for as long as it runs: gloo_abort ends what waits on them. */
class under_way {
    ring *r;

public:
    under_way(ring *of, std::vector<buffer *> buffers) : r(of)
    {
        std::lock_guard<std::mutex> held(r->lock);
        check();
        r->active = std::move(buffers);
    }
    ~under_way()
    {
        std::lock_guard<std::mutex> held(r->lock);
        r->active.clear();
    }
    /* An aborted wait returns as if all were well. */
    void finish()
    {
        std::lock_guard<std::mutex> held(r->lock);
        check();
    }
    under_way(const under_way &) = delete;
    under_way &operator=(const under_way &) = delete;

private:
    void check() const
    {
        if (r->ending)
            throw std::runtime_error("the communicator has ended");
    }
};

/* The rank whose connection failed with this exception, or -1: Gloo names it by a port alone, but says the same again to whoever
 * uses the connection next. */
int culprit(const ring *r, const std::exception &e)
{
    for (int i = 0; r->connected && i < r->context->size; i++) {
        try {
            if (i != r->context->rank && r->context->getPair(i))
                r->context->getPair(i)->send(r->context->createUnboundBuffer(nullptr, 0).get(), 0, 0, 0);
        } catch (const std::exception &again) {
            if (!std::strcmp(again.what(), e.what()))
                return i;
        }
    }
    return -1;
}

vla_status failed(const ring *r, const char *what, const std::exception &e, vla_error *err)
{
    std::string text = e.what(); /* after the place in Gloo's source */
    if (text.rfind("[", 0) == 0 && text.find("] ") != std::string::npos)
        text.erase(0, text.find("] ") + 2);
    int rank = culprit(r, e);
    if (rank >= 0)
        return vlai_fail(err, VLA_E_NCCL, "%s: rank %d (host %s): %s", what, rank, r->hosts[static_cast<size_t>(rank)].c_str(), text.c_str());
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

/* The address of this host on the way to `host`, which may be itself; empty when that cannot be told, or is the loopback. */
std::string address_towards(const char *host, int family)
{
    addrinfo hints = {}, *found = nullptr;
    hints.ai_family = family;
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
            !getnameinfo(reinterpret_cast<sockaddr *>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) &&
            std::strncmp(text, "127.", 4) && std::strcmp(text, "::1"))
            result = text;
        if (fd >= 0)
            close(fd);
    }
    freeaddrinfo(found);
    return result;
}

/* Rank 0 listens where nobody else's host could come to. */
bool is_loopback(const char *host)
{
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, nullptr, &hints, &found))
        return false;
    char text[NI_MAXHOST] = "";
    bool result = !getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST) &&
                  (!std::strncmp(text, "127.", 4) || !std::strcmp(text, "::1"));
    freeaddrinfo(found);
    return result;
}

/* Where this rank listens: at the interface that GLOO_SOCKET_IFNAME names; on one host, which the environment tells and not the
 * hosts' names, the loopback; else where rank 0, or another host, is reached from. All ranks must choose one family of addresses:
 * IPv4 where there is one. */
gloo::transport::tcp::attr place(const vlai_group *group, const std::vector<std::string> &hosts)
{
    gloo::transport::tcp::attr attr;
    const char *name = std::getenv("GLOO_SOCKET_IFNAME");
    const vlai_ranks *ranks = vlai_group_ranks(group);
    if (name && *name) {
        attr.iface = name;
        return attr;
    }
    if (ranks->local_world == ranks->world || is_loopback(ranks->address)) {
        attr.hostname = "127.0.0.1";
        return attr;
    }
    const std::string &own = hosts[static_cast<size_t>(ranks->rank)];
    std::vector<std::string> others = {ranks->address};
    for (const std::string &host : hosts)
        if (host != own)
            others.push_back(host);
    for (int family : {AF_INET, AF_INET6})
        for (const std::string &host : others)
            if (attr.hostname.empty())
                attr.hostname = address_towards(host.c_str(), family);
    return attr; /* no name: Gloo takes what this host's name stands for */
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

void exchange(ring *r, const void *in, void *out, size_t bytes)
{
    auto from = r->context->createUnboundBuffer(const_cast<void *>(in), bytes), to = r->context->createUnboundBuffer(out, bytes);
    std::vector<buffer *> both = {from.get(), to.get()};
    gloo::AlltoallOptions options(r->context);
    options.setInput<char>(std::move(from));
    options.setOutput<char>(std::move(to));
    under_way call(r, both);
    gloo::alltoall(options);
    call.finish();
}

void gather(ring *r, void *data, size_t bytes)
{
    auto all = r->context->createUnboundBuffer(data, bytes);
    std::vector<buffer *> one = {all.get()};
    gloo::AllgatherOptions options(r->context);
    options.setOutput<char>(std::move(all));
    under_way call(r, one);
    gloo::allgather(options);
    call.finish();
}

void gloo_close(void *state)
{
    without_sigpipe quiet;
    delete static_cast<ring *>(state);
}

vla_status gloo_reduce_scatter(void *state, const void *in, void *out, int64_t n, vla_dtype dtype, void *scratch, void *, vla_error *err)
{
    ring *r = static_cast<ring *>(state);
    return guarded(r, "reduce_scatter", err, [&] {
        exchange(r, in, scratch, static_cast<size_t>(n * r->context->size) * vla_dtype_size(dtype));
        sum(scratch, r->context->size, n, dtype, out);
    });
}

vla_status gloo_all_gather(void *state, void *data, int64_t n, vla_dtype dtype, void *, vla_error *err)
{
    ring *r = static_cast<ring *>(state);
    return guarded(r, "all_gather", err, [&] { gather(r, data, static_cast<size_t>(n * r->context->size) * vla_dtype_size(dtype)); });
}

/* Every rank sums one part, and the sums are gathered: padded to parts of one size in the first half of the scratch. */
vla_status gloo_all_reduce(void *state, void *data, int64_t n, vla_dtype dtype, void *scratch, void *, vla_error *err)
{
    ring *r = static_cast<ring *>(state);
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

/* Every wait of the collective under way is aborted, until it has none left. */
void gloo_abort(void *state)
{
    ring *r = static_cast<ring *>(state);
    for (bool waiting = true; waiting;) {
        {
            std::lock_guard<std::mutex> held(r->lock);
            r->ending = true;
            for (buffer *b : r->active) {
                b->abortWaitSend();
                b->abortWaitRecv();
            }
            waiting = !r->active.empty();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(waiting));
    }
}

} // namespace

const vlai_transport vlai_gloo = {gloo_close, gloo_reduce_scatter, gloo_all_gather, gloo_all_reduce, nullptr, gloo_abort, nullptr, nullptr};

vla_status vlai_gloo_open(vlai_group *group, double limit, void **state, vla_error *err)
{
    static std::atomic<int> opened; /* every rank opens the same communicators, so that the number names one of them */
    int world = vlai_group_world(group);
    *state = nullptr;
    std::unique_ptr<ring> r(new (std::nothrow) ring());
    if (!r)
        return vlai_nomem(err, sizeof *r);
    r->limit = limit + 3; /* the group's own watch, which knows the rank that stands still, speaks first */
    vla_status status = guarded(r.get(), "connecting the ranks", err, [&] {
        for (int i = 0; i < world; i++)
            r->hosts.emplace_back(vlai_group_host(group, i));
        auto device = gloo::transport::tcp::CreateDevice(place(group, r->hosts));
        r->context = std::make_shared<gloo::rendezvous::Context>(vlai_group_rank(group), world);
        r->context->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(r->limit * 1e3)));
        meeting store(group, "gloo/" + std::to_string(opened++) + "/");
        r->context->connectFullMesh(store, device);
        r->connected = true;
    });
    if (status != VLA_OK)
        return status == VLA_E_NCCL ? vlai_hint(err, status, "GLOO_SOCKET_IFNAME names the network interface between the hosts") : status;
    *state = r.release();
    return VLA_OK;
}
