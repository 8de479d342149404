#include "interrupt.h"

#include "base/io.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char doomed[4096]; /* "": nothing */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sem_t came;
static _Atomic int number; /* the signal; a handler may run in any thread */

/* Libraries have threads that block no signal, so that a handler takes it, and a thread does what no handler may. */
static void on_signal(int n)
{
    number = n;
    sem_post(&came);
}

/* Threads that still write may put a file into a folder that is being emptied, or may be about to make it; once it is gone they
 * cannot. */
static void *watch(void *unused)
{
    enum { TRIES = 20 };
    const struct timespec moment = {.tv_nsec = 20000000};
    struct stat left;
    while (sem_wait(&came) != 0)
        ;
    pthread_mutex_lock(&lock);
    for (int i = 0; *doomed && i < TRIES; i++) {
        vlai_remove_tree(doomed, NULL);
        nanosleep(&moment, NULL);
        if (lstat(doomed, &left) != 0)
            break;
    }
    signal(number, SIG_DFL);
    raise(number);
    return unused;
}

void interrupt_removes(const char *path)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction now, action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    pthread_t thread;
    if (snprintf(doomed, sizeof doomed, "%s", path) >= (int)sizeof doomed || sem_init(&came, 0, 0) != 0 ||
        pthread_create(&thread, NULL, watch, NULL) != 0) {
        *doomed = 0;
        return;
    }
    pthread_detach(thread);
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 3; i++)
        if (sigaction(numbers[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            sigaction(numbers[i], &action, NULL);
}

void interrupt_yield(void)
{
    while (number)
        pause();
}

void interrupt_keeps(void)
{
    pthread_mutex_lock(&lock);
    *doomed = 0;
    pthread_mutex_unlock(&lock);
}
