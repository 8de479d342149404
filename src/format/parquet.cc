/* The shim over Arrow's Parquet library: file.read and file.write in terms of columns, definition and repetition levels.
 *
 * The low-level column readers are used rather than Arrow tables: they compile in two seconds, keep nulls and list
 * borders visible, and copy nothing twice. Levels: every optional or repeated node on the way to a leaf adds one
 * definition level, every repeated node one repetition level; repetition level 0 starts a row. */
#include "format/parquet.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/work.h"
#include "format/page_header.h"

#include "arrow/buffer.h"
#include "arrow/io/file.h"
#include "arrow/io/memory.h"
#include "arrow/memory_pool.h"
#include "arrow/util/key_value_metadata.h"
#include "parquet/column_reader.h"
#include "parquet/column_writer.h"
#include "parquet/file_reader.h"
#include "parquet/file_writer.h"
#include "parquet/metadata.h"
#include "parquet/statistics.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <sys/stat.h>
#include <type_traits>
#include <unistd.h>
#include <vector>

namespace {

/* Arrow's buffers come from the library's allocator, with a bound per file: a damaged page header may claim 2 GiB. */
class pool final : public arrow::MemoryPool {
  public:
    using arrow::MemoryPool::Allocate;
    using arrow::MemoryPool::Free;
    using arrow::MemoryPool::Reallocate;
    static constexpr int64_t LIMIT = int64_t(1) << 30;

    arrow::Status Allocate(int64_t size, int64_t alignment, uint8_t **out) override
    {
        if (size < 0 || size > LIMIT - used)
            return arrow::Status::OutOfMemory("a page of ", size, " bytes is refused");
        void *data = vlai_alloc_aligned(size ? (size_t)size : 1, (size_t)alignment);
        if (!data)
            return arrow::Status::OutOfMemory("allocation of ", size, " bytes failed");
        used += size;
        total += size;
        count++;
        if (used > most)
            most = used;
        *out = (uint8_t *)data;
        return arrow::Status::OK();
    }
    arrow::Status Reallocate(int64_t old_size, int64_t new_size, int64_t alignment, uint8_t **ptr) override
    {
        uint8_t *fresh = nullptr;
        ARROW_RETURN_NOT_OK(Allocate(new_size, alignment, &fresh));
        memcpy(fresh, *ptr, (size_t)(old_size < new_size ? old_size : new_size));
        Free(*ptr, old_size, alignment);
        *ptr = fresh;
        return arrow::Status::OK();
    }
    void Free(uint8_t *buffer, int64_t size, int64_t) override
    {
        vlai_free(buffer);
        used -= size;
    }
    int64_t bytes_allocated() const override { return used; }
    int64_t max_memory() const override { return most; }
    int64_t total_bytes_allocated() const override { return total; }
    int64_t num_allocations() const override { return count; }
    std::string backend_name() const override { return "vla"; }

  private:
    int64_t used = 0, most = 0, total = 0, count = 0;
};

/* Runs `body` and turns whatever it throws into an error. */
template <class Body> vla_status guarded(const std::string &path, vla_error *err, Body body)
{
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return vlai_fail(err, VLA_E_NOMEM, "%s: out of host memory", path.c_str());
    } catch (const parquet::ParquetStatusException &e) {
        vla_status status = e.status().IsOutOfMemory() ? VLA_E_NOMEM : e.status().IsIOError() ? VLA_E_IO : VLA_E_CORRUPT;
        return vlai_fail(err, status, "%s: %s", path.c_str(), e.status().message().c_str());
    } catch (const std::exception &e) {
        if (strstr(e.what(), "deserialize thrift")) /* what follows may hold bytes of the file */
            return vlai_fail_hint(err, VLA_E_CORRUPT, "download the file again", "%s: damaged: its footer or the header of a page cannot be decoded",
                                  path.c_str());
        return vlai_fail(err, VLA_E_CORRUPT, "%s: %s", path.c_str(), e.what());
    } catch (...) {
        return vlai_fail(err, VLA_E_INTERNAL, "%s: unknown exception", path.c_str());
    }
}

/* The value of an Arrow result, or its status as an exception for `guarded`. */
template <class T> T must(arrow::Result<T> result)
{
    if (!result.ok())
        throw parquet::ParquetStatusException(result.status());
    return std::move(result).ValueOrDie();
}

struct leaf_info {
    parquet::Type::type type;
    int16_t max_def, max_rep;
    int16_t row_def;     /* below: the row is null */
    int16_t element_def; /* at or above: an element of the innermost list is there (perhaps null) */
    bool is_unsigned32;
};

struct group_info {
    int64_t first, rows;
};

/* Where the pages of one column chunk lie, so that one picture costs one page and not the chunk. */
struct page_info {
    int64_t offset, bytes; /* header included */
    int64_t first, rows;   /* inside the row group */
    bool dictionary;       /* its values are numbers of dictionary entries */
};

struct page_table {
    bool usable = false;
    int64_t dictionary_offset = 0, dictionary_bytes = 0;
    std::vector<page_info> pages;
};

} // namespace

struct vlai_parquet {
    std::string path;
    pool memory; /* before what uses it */
    std::shared_ptr<arrow::io::ReadableFile> source;
    std::unique_ptr<parquet::ParquetFileReader> reader;
    std::shared_ptr<parquet::FileMetaData> meta;
    std::map<std::pair<int, int>, page_table> tables; /* by row group and leaf */
    std::vector<vlai_parquet_column> columns;
    std::vector<std::string> names;
    std::vector<leaf_info> leaves;
    std::vector<group_info> groups;
    int64_t rows = 0;
};

/* --- opening --- */

namespace {

/* Names the common ways in which a file is not Parquet before Arrow is asked. */
vla_status check_ends(const char *path, vla_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe that nobody writes to is no reason to wait */
    if (fd < 0)
        return vlai_fail(err, errno == ENOENT ? VLA_E_NOT_FOUND : VLA_E_IO, "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    char head[64] = {0};
    uint8_t tail[8] = {0};
    bool read = fstat(fd, &st) == 0;
    if (read && !S_ISREG(st.st_mode)) {
        close(fd);
        return vlai_fail(err, VLA_E_IO, "%s: not a regular file", path);
    }
    ssize_t got = read ? pread(fd, head, sizeof head - 1, 0) : -1;
    if (read && st.st_size >= 12)
        read = pread(fd, tail, 8, st.st_size - 8) == 8;
    close(fd);
    if (!read || got < 0)
        return vlai_fail(err, VLA_E_IO, "%s: cannot read", path);
    long long size = (long long)st.st_size;
    if (size == 0)
        return vlai_fail_hint(err, VLA_E_FORMAT, "download the file again", "%s: empty file (0 bytes)", path);
    if (!strncmp(head, "version https://git-lfs", 23))
        return vlai_fail_hint(err, VLA_E_FORMAT, "fetch the real file: git lfs pull, or download the set again",
                              "%s: a Git-LFS pointer (%lld bytes of text), not a Parquet file", path, size);
    if (size < 12 || memcmp(head, "PAR1", 4))
        return vlai_fail(err, VLA_E_FORMAT, "%s: not a Parquet file (%lld bytes, no PAR1 at the start)", path, size);
    if (memcmp(tail + 4, "PAR1", 4))
        return vlai_fail_hint(err, VLA_E_FORMAT,
                              "the download or the recording was cut short: fetch the file again",
                              "%s: truncated: no PAR1 at the end (%lld bytes), so the footer is missing", path, size);
    uint32_t footer = (uint32_t)tail[0] | (uint32_t)tail[1] << 8 | (uint32_t)tail[2] << 16 | (uint32_t)tail[3] << 24;
    if ((long long)footer > size - 12)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: damaged: footer longer than the file (%u of %lld bytes)", path, footer,
                         size);
    return VLA_OK;
}

leaf_info describe_leaf(const parquet::ColumnDescriptor *d)
{
    leaf_info leaf = {};
    leaf.type = d->physical_type();
    leaf.max_def = d->max_definition_level();
    leaf.max_rep = d->max_repetition_level();
    std::vector<const parquet::schema::Node *> way;
    for (const parquet::schema::Node *n = d->schema_node().get(); n && n->parent(); n = n->parent())
        way.push_back(n);
    int16_t def = 0;
    for (size_t i = way.size(); i-- > 0;) {
        def += !way[i]->is_required();
        if (i + 1 == way.size())
            leaf.row_def = def;
        if (way[i]->is_repeated())
            leaf.element_def = def;
    }
    auto logical = d->logical_type();
    if (logical && logical->is_int() && leaf.type == parquet::Type::INT32)
        leaf.is_unsigned32 = !static_cast<const parquet::IntLogicalType &>(*logical).is_signed();
    return leaf;
}

vlai_parquet_type kind_of(const parquet::ColumnDescriptor *d)
{
    auto logical = d->logical_type();
    if (logical && (logical->is_decimal() || logical->is_timestamp() || logical->is_date() || logical->is_time()))
        return VLAI_PARQUET_OTHER;
    switch (d->physical_type()) {
    case parquet::Type::BOOLEAN:
    case parquet::Type::INT32:
    case parquet::Type::INT64: return VLAI_PARQUET_I64;
    case parquet::Type::FLOAT: return VLAI_PARQUET_F32;
    case parquet::Type::DOUBLE: return VLAI_PARQUET_F64;
    case parquet::Type::BYTE_ARRAY: return VLAI_PARQUET_TEXT;
    case parquet::Type::FIXED_LEN_BYTE_ARRAY:
        return d->type_length() == 2 && logical && logical->is_float16() ? VLAI_PARQUET_F32 : VLAI_PARQUET_OTHER;
    default: return VLAI_PARQUET_OTHER;
    }
}

/* IEEE half, two bytes, little end first. */
float half_to_float(const uint8_t *p)
{
    int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent     ? std::ldexp((float)(fraction + 1024), exponent - 25)
                                 : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -value : value;
}

void describe_columns(vlai_parquet *file)
{
    const parquet::SchemaDescriptor *schema = file->meta->schema();
    int n = schema->num_columns();
    file->leaves.reserve((size_t)n);
    for (int i = 0; i < n; i++)
        file->leaves.push_back(describe_leaf(schema->Column(i)));
    std::vector<const parquet::schema::Node *> seen;
    for (int i = 0; i < n;) {
        const parquet::schema::Node *root = schema->GetColumnRoot(i);
        int end = i;
        while (end < n && schema->GetColumnRoot(end) == root)
            end++;
        vlai_parquet_column c = {};
        c.leaf = i;
        c.leaf_path = -1;
        c.depth = file->leaves[(size_t)i].max_rep;
        c.type = VLAI_PARQUET_OTHER;
        c.stored = "GROUP";
        if (end == i + 1 && (c.depth > 0 || root->is_primitive())) {
            c.type = kind_of(schema->Column(i));
            switch (file->leaves[(size_t)i].type) {
            case parquet::Type::BOOLEAN: c.stored = "BOOLEAN"; break;
            case parquet::Type::INT32: c.stored = "INT32"; break;
            case parquet::Type::INT64: c.stored = "INT64"; break;
            case parquet::Type::FLOAT: c.stored = "FLOAT"; break;
            case parquet::Type::DOUBLE: c.stored = "DOUBLE"; break;
            case parquet::Type::BYTE_ARRAY: c.stored = "BYTE_ARRAY"; break;
            default: c.stored = c.type == VLAI_PARQUET_F32 ? "FLOAT16" : "FIXED_LEN_BYTE_ARRAY"; break;
            }
        } else if (c.depth == 0) {
            int bytes = -1, text = -1;
            for (int k = i; k < end; k++) {
                const std::string &name = schema->Column(k)->name();
                bool blob = file->leaves[(size_t)k].type == parquet::Type::BYTE_ARRAY;
                if (name == "bytes" && blob)
                    bytes = k;
                else if (name == "path" && blob)
                    text = k;
            }
            if (bytes >= 0) {
                c.type = VLAI_PARQUET_IMAGE;
                c.stored = "IMAGE";
                c.leaf = bytes;
                c.leaf_path = text;
            }
        }
        file->columns.push_back(c);
        file->names.push_back(root->name());
        i = end;
    }
    for (size_t i = 0; i < file->columns.size(); i++)
        file->columns[i].name = file->names[i].c_str();
}

} // namespace

vla_status vlai_parquet_open(const char *path, vlai_parquet **out, vla_error *err)
{
    *out = nullptr;
    vlai_work_add();
    VLA_TRY(check_ends(path, err));
    vlai_parquet *file = new (std::nothrow) vlai_parquet;
    if (!file)
        return vlai_nomem(err, sizeof *file);
    vla_status status = guarded(path, err, [&]() -> vla_status {
        file->path = path;
        parquet::ReaderProperties properties(&file->memory);
        properties.enable_buffered_stream(); /* bounded memory for row groups full of pictures */
        properties.set_buffer_size(64 << 10);
        file->source = must(arrow::io::ReadableFile::Open(path, &file->memory));
        file->reader = parquet::ParquetFileReader::Open(file->source, properties);
        file->meta = file->reader->metadata();
        describe_columns(file);
        int n = file->meta->num_row_groups();
        for (int g = 0; g < n; g++) {
            int64_t rows = file->meta->RowGroup(g)->num_rows();
            if (rows < 0 || rows > INT64_MAX - file->rows)
                return vlai_fail(err, VLA_E_CORRUPT, "%s: row group %d claims %lld rows", path, g, (long long)rows);
            file->groups.push_back({file->rows, rows});
            file->rows += rows;
        }
        if (file->rows != file->meta->num_rows())
            return vlai_fail(err, VLA_E_CORRUPT, "%s: footer claims %lld rows, its row groups hold %lld", path,
                             (long long)file->meta->num_rows(), (long long)file->rows);
        return VLA_OK;
    });
    if (status != VLA_OK)
        vlai_parquet_close(file);
    else
        *out = file;
    return status;
}

void vlai_parquet_close(vlai_parquet *file)
{
    if (!file)
        return;
    file->reader.reset();
    delete file;
}

int64_t vlai_parquet_rows(const vlai_parquet *file)
{
    return file->rows;
}

int vlai_parquet_column_count(const vlai_parquet *file)
{
    return (int)file->columns.size();
}

const vlai_parquet_column *vlai_parquet_column_at(const vlai_parquet *file, int i)
{
    return &file->columns[(size_t)i];
}

const vlai_parquet_column *vlai_parquet_find(const vlai_parquet *file, const char *name)
{
    for (const vlai_parquet_column &c : file->columns)
        if (!strcmp(c.name, name))
            return &c;
    return nullptr;
}

const char *vlai_parquet_metadata(const vlai_parquet *file, const char *key)
{
    const auto &pairs = file->meta->key_value_metadata();
    int i = pairs ? pairs->FindKey(key) : -1;
    return i < 0 ? nullptr : pairs->value(i).c_str();
}

int vlai_parquet_group_count(const vlai_parquet *file)
{
    return (int)file->groups.size();
}

int64_t vlai_parquet_group_first(const vlai_parquet *file, int group)
{
    return file->groups[(size_t)group].first;
}

int64_t vlai_parquet_group_rows(const vlai_parquet *file, int group)
{
    return file->groups[(size_t)group].rows;
}

bool vlai_parquet_group_range(const vlai_parquet *file, int group, const vlai_parquet_column *column, int64_t *min,
                              int64_t *max)
{
    if (column->depth != 0 || file->leaves[(size_t)column->leaf].type != parquet::Type::INT64)
        return false;
    return guarded(file->path, nullptr, [&]() -> vla_status {
        auto chunk = file->meta->RowGroup(group)->ColumnChunk(column->leaf);
        if (!chunk->is_stats_set())
            return VLA_E_NOT_FOUND;
        auto stats = chunk->statistics();
        if (!stats || !stats->HasMinMax() || stats->physical_type() != parquet::Type::INT64)
            return VLA_E_NOT_FOUND;
        std::string low = stats->EncodeMin(), high = stats->EncodeMax();
        if (low.size() != 8 || high.size() != 8)
            return VLA_E_NOT_FOUND;
        memcpy(min, low.data(), 8);
        memcpy(max, high.data(), 8);
        return VLA_OK;
    }) == VLA_OK;
}

/* --- reading --- */

namespace {

enum { BATCH = 8192 };

struct storage {
    size_t offsets_room, null_room, value_room, path_room;
    vlai_arena arena; /* bytes of texts and pictures */
};

/* One more element in a growing array of the result. */
template <class T> T *room(T **array, size_t *capacity, int64_t count)
{
    if (vlai_reserve((void **)array, capacity, (size_t)count, sizeof(T), nullptr) != VLA_OK)
        throw std::bad_alloc();
    return *array + count;
}

void put_number(vlai_parquet_values *out, storage *st, vlai_parquet_type want, double real, int64_t whole, bool is_real,
                const char *name)
{
    switch (want) {
    case VLAI_PARQUET_F32: *room(&out->f32, &st->value_room, out->count) = is_real ? (float)real : (float)whole; break;
    case VLAI_PARQUET_F64: *room(&out->f64, &st->value_room, out->count) = is_real ? real : (double)whole; break;
    default:
        if (is_real) {
            if (!(real >= -9007199254740992.0 && real <= 9007199254740992.0) || real != std::floor(real))
                throw parquet::ParquetException("column '", name, "' holds ", real, " where a whole number is wanted");
            whole = (int64_t)real;
        }
        *room(&out->i64, &st->value_room, out->count) = whole;
    }
    out->count++;
}

vlai_parquet_bytes copy_bytes(storage *st, const parquet::ByteArray &b)
{
    uint8_t *data = (uint8_t *)vlai_arena_alloc(&st->arena, (size_t)b.len + 1);
    if (!data)
        throw std::bad_alloc();
    if (b.len)
        memcpy(data, b.ptr, b.len);
    return {data, b.len};
}

/* Where the values of one leaf go. `side` = the path member of an image: fills `paths` only. */
struct sink {
    vlai_parquet_values *out;
    storage *st;
    vlai_parquet_type want;
    const char *name;
    const leaf_info *leaf;
    bool side;

    void row(int64_t at)
    {
        if (side)
            return;
        *room(&out->offsets, &st->offsets_room, at) = out->count;
        *room(&out->null, &st->null_room, at) = 0;
    }
    void null(int64_t at, int how)
    {
        if (side) {
            vlai_parquet_bytes *p = room(&out->paths, &st->path_room, at);
            p->data = nullptr;
            p->size = 0;
            return;
        }
        if (!out->null[at])
            out->nulls++;
        out->null[at] = (uint8_t)how;
    }
    void value(int64_t, const float &v) { put_number(out, st, want, v, 0, true, name); }
    void value(int64_t, const double &v) { put_number(out, st, want, v, 0, true, name); }
    void value(int64_t, const int64_t &v) { put_number(out, st, want, 0, v, false, name); }
    void value(int64_t, const bool &v) { put_number(out, st, want, 0, v, false, name); }
    void value(int64_t, const int32_t &v)
    {
        put_number(out, st, want, 0, leaf->is_unsigned32 ? (int64_t)(uint32_t)v : (int64_t)v, false, name);
    }
    void value(int64_t, const parquet::FixedLenByteArray &v)
    {
        put_number(out, st, want, (double)half_to_float(v.ptr), 0, true, name);
    }
    void value(int64_t at, const parquet::ByteArray &v)
    {
        if (side) {
            vlai_parquet_bytes copy = copy_bytes(st, v);
            *room(&out->paths, &st->path_room, at) = copy;
            return;
        }
        vlai_parquet_bytes copy = copy_bytes(st, v);
        *room(&out->bytes, &st->value_room, out->count) = copy;
        out->count++;
    }
};

/* Rows skip .. skip+rows-1 of one column chunk; `at` = rows already in the result. */
template <class Physical>
void read_chunk(parquet::ColumnReader *column, int64_t skip, int64_t rows, int64_t at, sink *to)
{
    auto *reader = static_cast<parquet::TypedColumnReader<Physical> *>(column);
    using T = typename Physical::c_type;
    const leaf_info &leaf = *to->leaf;
    std::vector<int16_t> def(BATCH), rep(BATCH);
    std::unique_ptr<T[]> values(new T[BATCH]);
    int64_t row = -1; /* inside the chunk */
    if (leaf.max_rep == 0 && skip > 0) {
        if (reader->Skip(skip) != skip)
            throw parquet::ParquetException("fewer rows than the footer claims");
        row = skip - 1;
    }
    bool done = false, gone = false; /* gone: the row at hand is null */
    while (!done && reader->HasNext()) {
        int64_t ask = BATCH, got_values = 0;
        if (leaf.max_rep == 0)
            ask = std::min<int64_t>(ask, skip + rows - 1 - row);
        if (ask == 0)
            break;
        int64_t levels = reader->ReadBatch(ask, def.data(), rep.data(), values.get(), &got_values);
        int64_t next = 0;
        for (int64_t i = 0; i < levels && !done; i++) {
            int16_t d = leaf.max_def ? def[(size_t)i] : 0;
            bool begins = leaf.max_rep == 0 || rep[(size_t)i] == 0;
            if (begins) {
                row++;
                if (row >= skip + rows) {
                    done = true;
                    break;
                }
                if (row >= skip)
                    to->row(at + row - skip);
            }
            if (row < 0)
                throw parquet::ParquetException("a column chunk starts inside a row");
            bool inside = row >= skip, null_row = d < leaf.row_def;
            if (!begins && (null_row || gone))
                throw parquet::ParquetException("column '", to->name, "' goes on inside a row that is null");
            gone = null_row;
            if (d == leaf.max_def) {
                if (next >= got_values)
                    throw parquet::ParquetException("fewer values than its levels say");
                if (inside)
                    to->value(at + row - skip, values[(size_t)next]);
                next++;
            } else if (inside && null_row) {
                to->null(at + row - skip, 1);
            } else if (inside && (leaf.max_rep == 0 || d >= leaf.element_def)) {
                to->null(at + row - skip, leaf.max_rep == 0 ? 1 : 2);
            }
        }
        if (levels == 0)
            break;
    }
    if (row + 1 < skip + rows)
        throw parquet::ParquetException("column '", to->name, "' ends after ", row + 1, " rows; the footer claims more");
}

/* Hops over the page headers of a chunk of texts or pictures. Whatever does not add up leaves the table unusable, and the
 * chunk is read in the ordinary way. */
const page_table &pages_of(vlai_parquet *file, int group, int leaf)
{
    page_table &table = file->tables[{group, leaf}];
    if (!table.pages.empty() || table.usable)
        return table;
    auto chunk = file->meta->RowGroup(group)->ColumnChunk(leaf);
    int64_t size = must(file->source->GetSize()), at = chunk->data_page_offset(), rows = 0;
    if (chunk->has_dictionary_page() && chunk->dictionary_page_offset() > 0 && chunk->dictionary_page_offset() < at)
        at = chunk->dictionary_page_offset();
    if (at < 4 || at > size || chunk->total_compressed_size() < 0 || chunk->total_compressed_size() > size - at)
        return table;
    std::vector<uint8_t> buffer(65536);
    for (int64_t end = at + chunk->total_compressed_size(); at < end;) {
        vlai_page_header header;
        bool whole = false;
        for (int64_t most : {512, 65536}) { /* the second only when statistics make the header long */
            int64_t got = must(file->source->ReadAt(at, std::min(most, end - at), buffer.data()));
            whole = vlai_page_header_parse(buffer.data(), (size_t)got, &header);
            if (whole)
                break;
        }
        if (!whole || (int64_t)header.length + header.compressed > end - at)
            return table;
        int64_t bytes = (int64_t)header.length + header.compressed;
        if (header.type == VLAI_PAGE_DICTIONARY) {
            table.dictionary_offset = at;
            table.dictionary_bytes = bytes;
        } else if (header.type == VLAI_PAGE_DATA || header.type == VLAI_PAGE_DATA_V2) {
            table.pages.push_back({at, bytes, rows, header.values, header.encoding == 2 || header.encoding == 8});
            rows += header.values;
        }
        at += bytes;
    }
    table.usable = rows == file->groups[(size_t)group].rows;
    return table;
}

/* Rows skip .. skip+rows-1 of a chunk, from the pages that hold them. False: the pages are not known. */
bool read_pages(vlai_parquet *file, int group, int leaf, int64_t skip, int64_t rows, int64_t at, sink *to)
{
    const page_table &table = pages_of(file, group, leaf);
    if (!table.usable)
        return false;
    const parquet::ColumnDescriptor *descriptor = file->meta->schema()->Column(leaf);
    auto codec = file->meta->RowGroup(group)->ColumnChunk(leaf)->compression();
    parquet::ReaderProperties properties(&file->memory);
    for (const page_info &page : table.pages) {
        int64_t low = std::max(skip, page.first), high = std::min(skip + rows, page.first + page.rows);
        if (low >= high)
            continue;
        int64_t before = page.dictionary ? table.dictionary_bytes : 0;
        std::shared_ptr<arrow::Buffer> bytes = must(arrow::AllocateBuffer(before + page.bytes, &file->memory));
        uint8_t *data = bytes->mutable_data();
        if ((before && must(file->source->ReadAt(table.dictionary_offset, before, data)) != before) ||
            must(file->source->ReadAt(page.offset, page.bytes, data + before)) != page.bytes)
            throw parquet::ParquetException("the file ends inside a page");
        auto pager = parquet::PageReader::Open(std::make_shared<arrow::io::BufferReader>(bytes), page.rows, codec, properties,
                                               *descriptor);
        auto column = parquet::ColumnReader::Make(descriptor, std::move(pager), &file->memory);
        read_chunk<parquet::ByteArrayType>(column.get(), low - page.first, high - low, at + low - skip, to);
    }
    return true;
}

void read_leaf(vlai_parquet *file, int leaf, int64_t first, int64_t rows, sink *to)
{
    enum { FEW = 8 }; /* rows for which single pages are fetched */
    int64_t at = 0;
    for (size_t g = 0; g < file->groups.size() && rows > 0; g++) {
        const group_info &group = file->groups[g];
        if (first >= group.first + group.rows)
            continue;
        int64_t skip = first - group.first, take = std::min(group.rows - skip, rows);
        const leaf_info &info = file->leaves[(size_t)leaf];
        if (info.type == parquet::Type::BYTE_ARRAY && info.max_rep == 0 && take <= FEW &&
            read_pages(file, (int)g, leaf, skip, take, at, to)) {
            at += take;
            first += take;
            rows -= take;
            continue;
        }
        auto column = file->reader->RowGroup((int)g)->Column(leaf);
        switch (file->leaves[(size_t)leaf].type) {
        case parquet::Type::BOOLEAN: read_chunk<parquet::BooleanType>(column.get(), skip, take, at, to); break;
        case parquet::Type::INT32: read_chunk<parquet::Int32Type>(column.get(), skip, take, at, to); break;
        case parquet::Type::INT64: read_chunk<parquet::Int64Type>(column.get(), skip, take, at, to); break;
        case parquet::Type::FLOAT: read_chunk<parquet::FloatType>(column.get(), skip, take, at, to); break;
        case parquet::Type::DOUBLE: read_chunk<parquet::DoubleType>(column.get(), skip, take, at, to); break;
        case parquet::Type::BYTE_ARRAY: read_chunk<parquet::ByteArrayType>(column.get(), skip, take, at, to); break;
        case parquet::Type::FIXED_LEN_BYTE_ARRAY: read_chunk<parquet::FLBAType>(column.get(), skip, take, at, to); break;
        default: throw parquet::ParquetException("physical type not read");
        }
        at += take;
        first += take;
        rows -= take;
    }
}

} // namespace

vla_status vlai_parquet_read(vlai_parquet *file, const vlai_parquet_column *column, int64_t first, int64_t rows,
                             vlai_parquet_type want, vlai_parquet_values *out, vla_error *err)
{
    memset(out, 0, sizeof *out);
    vlai_work_add();
    if (first < 0 || rows < 0 || first > file->rows || rows > file->rows - first)
        return vlai_fail(err, VLA_E_INVALID, "%s: rows %lld..+%lld asked of %lld", file->path.c_str(), (long long)first,
                         (long long)rows, (long long)file->rows);
    bool number = want == VLAI_PARQUET_F32 || want == VLAI_PARQUET_F64 || want == VLAI_PARQUET_I64;
    bool stored_number =
        column->type == VLAI_PARQUET_F32 || column->type == VLAI_PARQUET_F64 || column->type == VLAI_PARQUET_I64;
    if (number ? !stored_number : want != column->type)
        return vlai_fail(err, VLA_E_DTYPE, "%s: column '%s' is stored as %s, which cannot be read as %s",
                         file->path.c_str(), column->name, column->stored,
                         number ? "numbers" : want == VLAI_PARQUET_IMAGE ? "pictures {bytes, path}" : "text");
    storage *st = (storage *)vlai_calloc(1, sizeof *st);
    if (!st)
        return vlai_nomem(err, sizeof *st);
    out->storage = st;
    vla_status status = guarded(file->path, err, [&]() -> vla_status {
        sink to = {out, st, want, column->name, &file->leaves[(size_t)column->leaf], false};
        read_leaf(file, column->leaf, first, rows, &to);
        *room(&out->offsets, &st->offsets_room, rows) = out->count;
        out->rows = rows;
        if (want == VLAI_PARQUET_IMAGE && column->leaf_path >= 0) {
            sink side = {out, st, want, column->name, &file->leaves[(size_t)column->leaf_path], true};
            read_leaf(file, column->leaf_path, first, rows, &side);
        }
        return VLA_OK;
    });
    if (status != VLA_OK)
        vlai_parquet_values_fini(out);
    return status;
}

void vlai_parquet_values_fini(vlai_parquet_values *values)
{
    storage *st = (storage *)values->storage;
    if (!st)
        return;
    vlai_free(values->offsets);
    vlai_free(values->null);
    vlai_free(values->f32);
    vlai_free(values->f64);
    vlai_free(values->i64);
    vlai_free(values->bytes);
    vlai_free(values->paths);
    vlai_arena_fini(&st->arena);
    vlai_free(st);
    memset(values, 0, sizeof *values);
}

/* --- writing --- */

namespace {

/* Arrow's output goes through the library's writer, so that failures can be injected and the file is synced. */
class stream final : public arrow::io::OutputStream {
  public:
    vlai_writer writer = {};
    vla_error error = VLA_ERROR_INIT;
    bool open = false, failed = false;

    arrow::Status Write(const void *data, int64_t size) override
    {
        if (open && vlai_writer_put(&writer, data, (size_t)size, &error) == VLA_OK)
            return arrow::Status::OK();
        failed = true;
        open = false;
        return arrow::Status::IOError(error.message);
    }
    using arrow::io::OutputStream::Write;
    arrow::Status Close() override { return arrow::Status::OK(); } /* closed by vlai_parquet_writer_close */
    bool closed() const override { return !open; }
    arrow::Result<int64_t> Tell() const override { return (int64_t)writer.offset; }
};

struct field {
    std::string name;
    vlai_parquet_type type;
    int depth;
    int64_t dims[3];
};

parquet::schema::NodePtr leaf_node(const std::string &name, vlai_parquet_type type)
{
    using namespace parquet;
    switch (type) {
    case VLAI_PARQUET_F32: return schema::PrimitiveNode::Make(name, Repetition::OPTIONAL, Type::FLOAT);
    case VLAI_PARQUET_F64: return schema::PrimitiveNode::Make(name, Repetition::OPTIONAL, Type::DOUBLE);
    case VLAI_PARQUET_I64: return schema::PrimitiveNode::Make(name, Repetition::OPTIONAL, Type::INT64);
    case VLAI_PARQUET_BOOL: return schema::PrimitiveNode::Make(name, Repetition::OPTIONAL, Type::BOOLEAN);
    default:
        return schema::PrimitiveNode::Make(name, Repetition::OPTIONAL, LogicalType::String(), Type::BYTE_ARRAY);
    }
}

parquet::schema::NodePtr field_node(const field &f)
{
    using namespace parquet;
    if (f.type == VLAI_PARQUET_IMAGE)
        return schema::GroupNode::Make(f.name, Repetition::OPTIONAL,
                                       {schema::PrimitiveNode::Make("bytes", Repetition::OPTIONAL, Type::BYTE_ARRAY),
                                        leaf_node("path", VLAI_PARQUET_TEXT)});
    if (f.depth == 0)
        return leaf_node(f.name, f.type);
    schema::NodePtr node = leaf_node("element", f.type);
    for (int d = f.depth; d > 0; d--) {
        auto list = schema::GroupNode::Make("list", Repetition::REPEATED, {node});
        node = schema::GroupNode::Make(d > 1 ? "element" : f.name, Repetition::OPTIONAL, {list}, LogicalType::List());
    }
    return node;
}

/* Levels of one column: a value per element, and one entry without a value for each empty list. */
struct levels {
    std::vector<int16_t> def, rep;
};

void make_levels(const field &f, int64_t rows, const int64_t *lengths, levels *out)
{
    int16_t full = (int16_t)(1 + 2 * f.depth);
    if (f.depth == 0) {
        out->def.assign((size_t)rows, full);
        return;
    }
    int64_t inner = 1;
    for (int d = 1; d < f.depth; d++)
        inner *= f.dims[d];
    for (int64_t r = 0; r < rows; r++) {
        int64_t outer = lengths ? lengths[r] : f.dims[0];
        if (outer == 0) {
            out->def.push_back(1);
            out->rep.push_back(0);
            continue;
        }
        for (int64_t i = 0; i < outer * inner; i++) {
            int16_t rep = 0;
            if (i > 0) { /* the outermost list that goes on: the shallowest depth whose index did not just wrap */
                int64_t block = 1;
                rep = (int16_t)f.depth;
                for (int d = f.depth - 1; d >= 1; d--) {
                    block *= f.dims[d];
                    if (i % block == 0)
                        rep = (int16_t)d;
                }
            }
            out->def.push_back(full);
            out->rep.push_back(rep);
        }
    }
}

template <class Physical>
void write_values(parquet::ColumnWriter *column, const levels &l, const typename Physical::c_type *values)
{
    auto *writer = static_cast<parquet::TypedColumnWriter<Physical> *>(column);
    int64_t n = (int64_t)l.def.size();
    /* A page is closed only between batches: pictures go in by twos, so that a page holds about a megabyte of them and one
     * of them can be read without the others. */
    if (std::is_same_v<Physical, parquet::ByteArrayType> && l.rep.empty()) {
        for (int64_t i = 0; i < n; i += 2)
            writer->WriteBatch(std::min<int64_t>(2, n - i), l.def.data() + i, nullptr, values + i);
        return;
    }
    writer->WriteBatch(n, l.def.data(), l.rep.empty() ? nullptr : l.rep.data(), values);
}

std::vector<parquet::ByteArray> byte_arrays(const vlai_parquet_bytes *values, size_t count)
{
    std::vector<parquet::ByteArray> arrays(count);
    for (size_t i = 0; i < count; i++) {
        if (values[i].size > UINT32_MAX)
            throw parquet::ParquetException("a value of ", values[i].size, " bytes is too large");
        arrays[i] = parquet::ByteArray((uint32_t)values[i].size, values[i].data);
    }
    return arrays;
}

} // namespace

struct vlai_parquet_writer {
    std::string path;
    std::vector<field> fields;
    std::shared_ptr<stream> out;
    std::unique_ptr<parquet::ParquetFileWriter> writer;
};

vla_status vlai_parquet_writer_open(const char *path, const vlai_parquet_field *fields, int count,
                                    const char *const *metadata, vlai_parquet_writer **out, vla_error *err)
{
    *out = nullptr;
    vlai_parquet_writer *w = new (std::nothrow) vlai_parquet_writer;
    if (!w)
        return vlai_nomem(err, sizeof *w);
    vla_status status = guarded(path, err, [&]() -> vla_status {
        w->path = path;
        w->out = std::make_shared<stream>();
        VLA_TRY(vlai_writer_open(&w->out->writer, path, err));
        w->out->open = true;
        parquet::schema::NodeVector nodes;
        parquet::WriterProperties::Builder properties;
        properties.compression(parquet::Compression::SNAPPY);
        properties.created_by("vla " VLA_VERSION);
        for (int i = 0; i < count; i++) {
            field f = {fields[i].name, fields[i].type, fields[i].depth, {0, 0, 0}};
            if (f.depth < 0 || f.depth > 3 || (f.type == VLAI_PARQUET_IMAGE && f.depth))
                return vlai_fail(err, VLA_E_INVALID, "%s: column '%s' nests %d deep", path, fields[i].name, f.depth);
            for (int d = 0; d < f.depth; d++)
                f.dims[d] = fields[i].dims[d];
            w->fields.push_back(f);
            nodes.push_back(field_node(f));
            if (f.type == VLAI_PARQUET_IMAGE) { /* pictures repeat never: no dictionary, no minimum */
                properties.disable_dictionary(f.name + ".bytes");
                properties.disable_statistics(f.name + ".bytes");
            }
        }
        auto schema = parquet::schema::GroupNode::Make("schema", parquet::Repetition::REQUIRED, nodes);
        std::vector<std::string> keys, values;
        for (; metadata && metadata[0]; metadata += 2) {
            keys.push_back(metadata[0]);
            values.push_back(metadata[1]);
        }
        w->writer = parquet::ParquetFileWriter::Open(
            w->out, std::static_pointer_cast<parquet::schema::GroupNode>(schema), properties.build(),
            keys.empty() ? nullptr : arrow::KeyValueMetadata::Make(keys, values));
        return VLA_OK;
    });
    if (status != VLA_OK)
        vlai_parquet_writer_abort(w);
    else
        *out = w;
    return status;
}

vla_status vlai_parquet_writer_append(vlai_parquet_writer *w, int64_t rows, const vlai_parquet_cells *cells,
                                      vla_error *err)
{
    vla_status status = guarded(w->path, err, [&]() -> vla_status {
        parquet::RowGroupWriter *group = w->writer->AppendRowGroup();
        for (size_t i = 0; i < w->fields.size(); i++) {
            const field &f = w->fields[i];
            levels l;
            make_levels(f, rows, f.dims[0] == 0 ? cells[i].lengths : nullptr, &l);
            parquet::ColumnWriter *column = group->NextColumn();
            size_t values = 0;
            for (int16_t d : l.def)
                values += d == 1 + 2 * f.depth;
            switch (f.type) {
            case VLAI_PARQUET_F32: write_values<parquet::FloatType>(column, l, (const float *)cells[i].values); break;
            case VLAI_PARQUET_F64: write_values<parquet::DoubleType>(column, l, (const double *)cells[i].values); break;
            case VLAI_PARQUET_I64: write_values<parquet::Int64Type>(column, l, (const int64_t *)cells[i].values); break;
            case VLAI_PARQUET_BOOL: {
                std::unique_ptr<bool[]> flags(new bool[values + 1]);
                for (size_t k = 0; k < values; k++)
                    flags[k] = ((const uint8_t *)cells[i].values)[k] != 0;
                write_values<parquet::BooleanType>(column, l, flags.get());
                break;
            }
            case VLAI_PARQUET_TEXT:
                write_values<parquet::ByteArrayType>(
                    column, l, byte_arrays((const vlai_parquet_bytes *)cells[i].values, values).data());
                break;
            default: {
                l.def.assign((size_t)rows, 2);
                write_values<parquet::ByteArrayType>(
                    column, l, byte_arrays((const vlai_parquet_bytes *)cells[i].values, (size_t)rows).data());
                column->Close();
                column = group->NextColumn();
                write_values<parquet::ByteArrayType>(column, l, byte_arrays(cells[i].paths, (size_t)rows).data());
            }
            }
            column->Close();
        }
        group->Close();
        return VLA_OK;
    });
    if (status != VLA_OK && w->out->failed && err)
        *err = w->out->error;
    return status;
}

uint64_t vlai_parquet_writer_bytes(const vlai_parquet_writer *w)
{
    return w->out->writer.offset;
}

vla_status vlai_parquet_writer_close(vlai_parquet_writer *w, vla_error *err)
{
    vla_status status = guarded(w->path, err, [&]() -> vla_status {
        w->writer->Close();
        return VLA_OK;
    });
    if (status != VLA_OK && w->out->failed && err)
        *err = w->out->error;
    if (status == VLA_OK) {
        w->out->open = false;
        status = vlai_writer_close(&w->out->writer, err);
        delete w;
        return status;
    }
    vlai_parquet_writer_abort(w);
    return status;
}

void vlai_parquet_writer_abort(vlai_parquet_writer *w)
{
    if (!w)
        return;
    try {
        w->writer.reset(); /* its destructor writes a footer; the file goes away next */
    } catch (...) {
    }
    if (w->out && w->out->open)
        vlai_writer_abort(&w->out->writer);
    delete w;
}
