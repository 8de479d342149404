#include "dist/wire.h"

#include "base/fail.h"
#include "base/memory.h"
#include "base/time.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BUFFER = 16 << 10, BUFFER_KEPT = 1 << 20, READS = 4, CONNECT_MS = 5000 };

static const uint8_t magic[4] = {'V', 'L', 'A', 'G'};

static void write_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

static uint32_t read_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

void vlai_wire_reason(int error, char *out, size_t room)
{
    if (error == ECONNRESET || error == EPIPE)
        snprintf(out, room, "connection closed");
    else if (strerror_r(error, out, room) != 0)
        snprintf(out, room, "error %d", error);
}

/* --- receiving --- */

void vlai_wire_init(vlai_wire *wire, int fd, size_t limit)
{
    *wire = (vlai_wire){.fd = fd, .limit = limit};
}

void vlai_wire_fini(vlai_wire *wire)
{
    if (wire->fd >= 0)
        close(wire->fd);
    vlai_free(wire->in);
    vlai_free(wire->out);
    *wire = (vlai_wire){.fd = -1};
}

/* Room for `more` bytes, in place or in a larger buffer. */
static bool make_room(uint8_t **data, size_t *first, size_t *size, size_t *capacity, size_t more)
{
    if (*first == *size)
        *first = *size = 0;
    if (*capacity - *size >= more)
        return true;
    if (*first) {
        memmove(*data, *data + *first, *size - *first);
        *size -= *first;
        *first = 0;
        if (*capacity - *size >= more)
            return true;
    }
    size_t wanted = *capacity ? *capacity : BUFFER;
    while (wanted - *size < more)
        wanted *= 2;
    uint8_t *grown = vlai_grow(*data, *size, wanted);
    if (!grown)
        return false;
    *data = grown;
    *capacity = wanted;
    return true;
}

/* A buffer that one large message has made large is given back. */
static void trim(uint8_t **data, size_t *first, size_t *size, size_t *capacity)
{
    if (*first < *size)
        return;
    *first = *size = 0;
    if (*capacity > BUFFER_KEPT) {
        vlai_free(*data);
        *data = NULL;
        *capacity = 0;
    }
}

bool vlai_wire_fill(vlai_wire *wire)
{
    trim(&wire->in, &wire->in_first, &wire->in_size, &wire->in_capacity);
    for (int i = 0; i < READS; i++) { /* a few reads, so that one talker does not hold up the others */
        if (!make_room(&wire->in, &wire->in_first, &wire->in_size, &wire->in_capacity, BUFFER / 2)) {
            snprintf(wire->why, sizeof wire->why, "no host memory for a message");
            return false;
        }
        size_t room = wire->in_capacity - wire->in_size;
        ssize_t n = recv(wire->fd, wire->in + wire->in_size, room, 0);
        if (n > 0) {
            wire->in_size += (size_t)n;
            wire->received += (size_t)n;
            if ((size_t)n < room)
                return true;
        } else if (n == 0) {
            snprintf(wire->why, sizeof wire->why, "connection closed");
            return false;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return true;
        } else if (errno != EINTR) {
            vlai_wire_reason(errno, wire->why, sizeof wire->why);
            return false;
        }
    }
    return true;
}

int vlai_wire_next(vlai_wire *wire, vlai_frame *out)
{
    const uint8_t *p = wire->in + wire->in_first;
    size_t have = wire->in_size - wire->in_first;
    if (have && memcmp(p, magic, have < 4 ? have : 4) != 0) {
        snprintf(wire->why, sizeof wire->why, "what it sends is not of a vla run");
        return -1;
    }
    if (have < VLAI_WIRE_HEADER)
        return 0;
    size_t size = read_u32(p + 12);
    if (size > wire->limit) {
        snprintf(wire->why, sizeof wire->why, "a message of %zu bytes, wanted at most %zu", size, wire->limit);
        return -1;
    }
    if (have - VLAI_WIRE_HEADER < size)
        return 0;
    *out = (vlai_frame){(unsigned)p[4] | (unsigned)p[5] << 8, read_u32(p + 8), p + VLAI_WIRE_HEADER, size};
    wire->in_first += VLAI_WIRE_HEADER + size;
    return 1;
}

/* --- heads --- */

static void head_bytes(vlai_head *head, const void *data, size_t size)
{
    if (head->failed || size > sizeof head->data - head->size) {
        head->failed = true;
        return;
    }
    memcpy(head->data + head->size, data, size);
    head->size += size;
}

void vlai_head_u32(vlai_head *head, uint32_t value)
{
    uint8_t bytes[4];
    write_u32(bytes, value);
    head_bytes(head, bytes, sizeof bytes);
}

void vlai_head_i64(vlai_head *head, int64_t value)
{
    vlai_head_u32(head, (uint32_t)((uint64_t)value & 0xffffffffu));
    vlai_head_u32(head, (uint32_t)((uint64_t)value >> 32));
}

void vlai_head_text(vlai_head *head, const char *text)
{
    size_t n = text ? strlen(text) : 0;
    vlai_head_u32(head, (uint32_t)(n < VLAI_WIRE_HEAD ? n : VLAI_WIRE_HEAD));
    if (n)
        head_bytes(head, text, n);
}

static const uint8_t *cut_bytes(vlai_cut *cut, size_t size)
{
    if (cut->failed || size > cut->size) {
        cut->failed = true;
        return NULL;
    }
    const uint8_t *p = cut->data;
    cut->data += size;
    cut->size -= size;
    return p;
}

uint32_t vlai_cut_u32(vlai_cut *cut)
{
    const uint8_t *p = cut_bytes(cut, 4);
    return p ? read_u32(p) : 0;
}

int64_t vlai_cut_i64(vlai_cut *cut)
{
    uint64_t low = vlai_cut_u32(cut), high = vlai_cut_u32(cut);
    return (int64_t)(low | high << 32);
}

void vlai_cut_text(vlai_cut *cut, char *out, size_t room)
{
    out[0] = 0;
    size_t n = vlai_cut_u32(cut);
    if (n >= room)
        cut->failed = true;
    const uint8_t *p = cut_bytes(cut, n);
    for (size_t i = 0; p && i < n; i++)
        out[i] = p[i] < 32 || p[i] == 127 ? '?' : (char)p[i];
    if (p)
        out[n] = 0;
}

/* --- sending --- */

bool vlai_wire_append(vlai_wire *wire, const void *data, size_t size)
{
    if (!size)
        return true;
    if (!make_room(&wire->out, &wire->out_first, &wire->out_size, &wire->out_capacity, size))
        return false;
    memcpy(wire->out + wire->out_size, data, size);
    wire->out_size += size;
    return true;
}

bool vlai_wire_start(vlai_wire *wire, unsigned type, uint32_t id, size_t size)
{
    if (size > VLAI_WIRE_PENDING || wire->out_size - wire->out_first > VLAI_WIRE_PENDING - size)
        return false;
    /* All of it or nothing: half a frame would make everything after it unreadable. */
    if (!make_room(&wire->out, &wire->out_first, &wire->out_size, &wire->out_capacity, VLAI_WIRE_HEADER + size))
        return false;
    uint8_t header[VLAI_WIRE_HEADER] = {0};
    memcpy(header, magic, sizeof magic);
    header[4] = (uint8_t)type;
    header[5] = (uint8_t)(type >> 8);
    write_u32(header + 8, id);
    write_u32(header + 12, (uint32_t)size);
    return vlai_wire_append(wire, header, sizeof header);
}

bool vlai_wire_put(vlai_wire *wire, unsigned type, uint32_t id, const vlai_head *head, const void *data, size_t size)
{
    size_t head_size = head ? head->size : 0;
    if (head && head->failed)
        return false;
    return vlai_wire_start(wire, type, id, head_size + size) && (!head || vlai_wire_append(wire, head->data, head_size)) &&
           vlai_wire_append(wire, data, size);
}

bool vlai_wire_flush(vlai_wire *wire)
{
    while (wire->out_first < wire->out_size) {
        ssize_t n = send(wire->fd, wire->out + wire->out_first, wire->out_size - wire->out_first, MSG_NOSIGNAL);
        if (n >= 0)
            wire->out_first += (size_t)n;
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            return false;
        else if (errno != EINTR)
            wire->out_first = wire->out_size;
    }
    trim(&wire->out, &wire->out_first, &wire->out_size, &wire->out_capacity);
    return true;
}

/* --- sockets --- */

static bool prepare(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return false;
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* refused by what is not TCP, which has no such delay */
    return true;
}

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return (ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24) == 127;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
}

/* A listener at the address, or -1 with errno. */
static int listen_at(const struct sockaddr *address, socklen_t size)
{
    int fd = socket(address->sa_family, SOCK_STREAM, 0);
    if (fd < 0)
        return -1;
    int on = 1, off = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); /* connections of an ended run do not hold the port */
    if (address->sa_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (prepare(fd) && bind(fd, address, size) == 0 && listen(fd, SOMAXCONN) == 0)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static int listen_anywhere(int port)
{
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = IN6ADDR_ANY_INIT};
    int fd = listen_at((const struct sockaddr *)&six, sizeof six);
    if (fd >= 0 || errno == EADDRINUSE || errno == EACCES)
        return fd;
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_ANY)}};
    return listen_at((const struct sockaddr *)&four, sizeof four);
}

static int resolve(const char *address, int port, struct addrinfo **list)
{
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    return getaddrinfo(address, service, &wanted, list);
}

bool vlai_wire_is_nowhere(const char *address)
{
    struct addrinfo *list = NULL;
    int failed = resolve(address, 0, &list);
    if (!failed)
        freeaddrinfo(list);
    return failed == EAI_NONAME;
}

static int listen_once(const char *address, int port, bool local)
{
    struct addrinfo *list = NULL;
    if (local && resolve(address, port, &list) == 0) {
        for (struct addrinfo *a = list; a; a = a->ai_next) {
            if (!is_loopback(a->ai_addr))
                continue;
            int fd = listen_at(a->ai_addr, a->ai_addrlen);
            if (fd >= 0 || errno == EADDRINUSE || errno == EACCES) {
                int error = errno;
                freeaddrinfo(list);
                errno = error;
                return fd;
            }
        }
        freeaddrinfo(list);
    }
    return listen_anywhere(port);
}

vla_status vlai_wire_listen(const char *address, int port, bool local, int *fd, vla_error *err)
{
    /* A rank that tries to connect before anybody listens may for a moment hold a port of the ephemeral range itself. */
    for (int i = 0; (*fd = listen_once(address, port, local)) < 0 && errno == EADDRINUSE && i < 10; i++)
        poll(NULL, 0, 100);
    if (*fd >= 0)
        return VLA_OK;
    int error = errno;
    char why[VLAI_WIRE_WHY], hint[256];
    vlai_wire_reason(error, why, sizeof why);
    if (error == EADDRINUSE)
        snprintf(hint, sizeof hint, "end what listens there (ss -ltnp 'sport = :%d' shows it), or set MASTER_PORT to a free port on every rank", port);
    else
        snprintf(hint, sizeof hint, "set MASTER_PORT to a free port above 1023 on every rank");
    return vlai_fail_hint(err, VLA_E_IO, hint, "rank 0 cannot listen at port %d for the other ranks: %s", port, why);
}

int vlai_wire_accept(int listener, char *peer, size_t room)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    int fd;
    do
        fd = accept(listener, (struct sockaddr *)&address, &size);
    while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (fd < 0)
        return -1;
    if (!prepare(fd)) {
        close(fd);
        return -1;
    }
    if (getnameinfo((const struct sockaddr *)&address, size, peer, (socklen_t)room, NULL, 0, NI_NUMERICHOST) != 0)
        snprintf(peer, room, "an unknown address");
    return fd;
}

/* A port of the ephemeral range where nobody listens may connect to itself. */
static bool connected_to_itself(int fd)
{
    struct sockaddr_storage a = {0}, b = {0};
    socklen_t n = sizeof a, m = sizeof b;
    return getsockname(fd, (struct sockaddr *)&a, &n) == 0 && getpeername(fd, (struct sockaddr *)&b, &m) == 0 && n == m &&
           memcmp(&a, &b, n) == 0;
}

static int connect_to(const struct addrinfo *a, double deadline, int *error)
{
    int fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
    if (fd < 0 || !prepare(fd)) {
        *error = errno;
        if (fd >= 0)
            close(fd);
        return -1;
    }
    *error = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (*error == EINPROGRESS || *error == EINTR) {
        double end = vlai_now() + CONNECT_MS / 1e3;
        if (end > deadline)
            end = deadline;
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        int ready = 0;
        for (double left; ready <= 0 && (left = end - vlai_now()) > 0;)
            ready = poll(&p, 1, (int)(left * 1e3) + 1);
        socklen_t size = sizeof *error;
        if (ready <= 0)
            *error = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, error, &size) < 0)
            *error = errno;
    }
    if (*error == 0 && connected_to_itself(fd)) {
        struct linger at_once = {1, 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        *error = ECONNREFUSED;
    }
    if (*error == 0)
        return fd;
    close(fd);
    return -1;
}

int vlai_wire_connect(const char *address, int port, double deadline, char *why, size_t room)
{
    struct addrinfo *list = NULL;
    int failed = resolve(address, port, &list), fd = -1;
    if (failed) {
        snprintf(why, room, "%s", gai_strerror(failed));
        return -1;
    }
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        int error = 0;
        fd = connect_to(a, deadline, &error);
        if (fd < 0)
            vlai_wire_reason(error, why, room);
    }
    freeaddrinfo(list);
    return fd;
}

vla_status vlai_wire_pair(int fd[2], vla_error *err)
{
    char why[VLAI_WIRE_WHY];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fd) < 0) {
        vlai_wire_reason(errno, why, sizeof why);
        return vlai_fail(err, VLA_E_IO, "no pair of sockets for rank 0: %s", why);
    }
    if (prepare(fd[0]) && prepare(fd[1]))
        return VLA_OK;
    vlai_wire_reason(errno, why, sizeof why);
    close(fd[0]);
    close(fd[1]);
    return vlai_fail(err, VLA_E_IO, "a socket cannot be made non-blocking: %s", why);
}
