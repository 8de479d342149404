/* What every test program includes: cmocka and two checks that print the library's own sentence. */
#ifndef VLA_TEST_H
#define VLA_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka after the headers it needs */
#include <cmocka.h>

#include "vla/error.h"

#define assert_ok(call, err)                                                                                   \
    do {                                                                                                       \
        vla_status status_ = (call);                                                                           \
        if (status_ != VLA_OK)                                                                                 \
            fail_msg("%s: %s: %s (%s)", #call, vla_status_name(status_), (err).message, (err).hint);           \
    } while (0)

/* The call must fail with this status, and its message must contain `part`. */
#define assert_fails(call, wanted, err, part)                                                                  \
    do {                                                                                                       \
        vla_status status_ = (call);                                                                           \
        if (status_ != (wanted))                                                                               \
            fail_msg("%s: got %s (%s), wanted %s", #call, vla_status_name(status_), (err).message,             \
                     vla_status_name(wanted));                                                                 \
        if (!strstr((err).message, part) && !strstr((err).hint, part))                                         \
            fail_msg("%s: message '%s' / hint '%s' lacks '%s'", #call, (err).message, (err).hint, part);       \
    } while (0)

/* $VLA_LONG asks for the long form (make check-long); $VLA_SANITIZED says that every step is ten times slower. */
static inline int test_long(void)
{
    const char *env = getenv("VLA_LONG");
    return env && *env;
}

static inline int test_sanitized(void)
{
    const char *env = getenv("VLA_SANITIZED");
    return env && *env;
}

/* The golden folder: $VLA_GOLDEN, else ../shared/golden, else tests/golden. NULL never. */
static inline const char *golden_dir(void)
{
    const char *env = getenv("VLA_GOLDEN");
    if (env && *env)
        return env;
    static const char shared[] = VLA_TEST_ROOT "/../shared/golden", own[] = VLA_TEST_ROOT "/tests/golden";
    FILE *f = fopen(VLA_TEST_ROOT "/../shared/golden/README.md", "r");
    if (!f)
        return own;
    fclose(f);
    return shared;
}

#endif
