/* The header of one page of a Parquet column chunk (Thrift compact protocol, struct PageHeader of the format's definition):
 * enough to hop from page to page without reading their data. */
#ifndef VLAI_PAGE_HEADER_H
#define VLAI_PAGE_HEADER_H

#include "vla/api.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

enum { VLAI_PAGE_DATA = 0, VLAI_PAGE_INDEX = 1, VLAI_PAGE_DICTIONARY = 2, VLAI_PAGE_DATA_V2 = 3 };

typedef struct vlai_page_header {
    int32_t type, compressed; /* kind; bytes that follow the header */
    int32_t values;           /* of a data page, nulls included */
    int32_t encoding;         /* of a data page: 2 and 8 need the dictionary */
    size_t length;            /* of the header itself */
} vlai_page_header;

/* False when `size` bytes do not hold a whole, sensible header. */
bool vlai_page_header_parse(const uint8_t *data, size_t size, vlai_page_header *out);

VLA_END_DECLS

#endif
