/* Memory as the system counts it; 0 where it does not say. */
#ifndef VLAI_SYSTEM_H
#define VLAI_SYSTEM_H

#include "vla/api.h"

VLA_BEGIN_DECLS

/* Resident bytes of this process, found without an allocation; the most that they were; and those of them that no file backs. */
uint64_t vlai_resident_bytes(void);
uint64_t vlai_peak_resident_bytes(void);
size_t vlai_anonymous_bytes(void);

/* Bytes that this process can still use: what the system has free or can free, at most what each of its control groups leaves below
 * its limit. Pages of files count as free in both: they make way. */
size_t vlai_available_bytes(void);
/* The same of a system whose /proc and /sys stand in a folder: for tests. */
size_t vlai_available_bytes_in(const char *root);

VLA_END_DECLS

#endif
