/* The entries of a zip archive in memory, as PyTorch writes them: stored, not compressed, possibly zip64.
 *
 *     vlai_zip zip;
 *     VLA_TRY(vlai_zip_open(data, size, path, &zip, err));
 *     const vlai_zip_entry *e = vlai_zip_find(&zip, "archive/data.pkl");
 *     vlai_zip_close(&zip);
 *
 * Entries borrow the memory. An entry that is compressed or encrypted is listed with NULL data. */
#ifndef VLAI_ZIP_H
#define VLAI_ZIP_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vlai_zip_entry {
    const char *name; /* not zero-terminated */
    size_t name_size;
    const uint8_t *data;
    size_t size;
} vlai_zip_entry;

typedef struct vlai_zip {
    vlai_zip_entry *entries; /* sorted by name */
    size_t count;
} vlai_zip;

vla_status vlai_zip_open(const uint8_t *data, size_t size, const char *name, vlai_zip *out, vla_error *err);
void vlai_zip_close(vlai_zip *zip);
const vlai_zip_entry *vlai_zip_find(const vlai_zip *zip, const char *name); /* NULL when absent */

VLA_END_DECLS

#endif
