/* Ports on loopback for tests, of which several run at a time. */
#ifndef VLA_TEST_PORTS_H
#define VLA_TEST_PORTS_H

#include "test.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

/* A port that nobody listens at, and that no other program is given as long as *fd is open. */
static inline int held_port(int *fd)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(*fd >= 0 && bind(*fd, (struct sockaddr *)&a, n) == 0 && getsockname(*fd, (struct sockaddr *)&a, &n) == 0);
    return ntohs(a.sin_port);
}

/* A port to listen at soon. */
static inline int free_port(void)
{
    int fd, port = held_port(&fd);
    close(fd);
    return port;
}

#endif
