/* The table of instructions: meta/tasks.jsonl (v2.x) or meta/tasks.parquet (v3.0, a pandas frame whose index is the
 * text: a column named "task" or "__index_level_0__"). */
#include "data/set.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/text.h"
#include "data/lines.h"
#include "format/parquet.h"

#include <stdlib.h>
#include <string.h>

typedef struct task_list {
    vla_dataset *set;
    vlai_findings *findings;
    const char *file;
    vlai_task *tasks;
    size_t count, room;
} task_list;

static vla_status add_task(task_list *list, int64_t index, const char *text, size_t size, vla_error *err)
{
    size_t valid = vlai_utf8_check(text, size), end = strlen(text);
    if (valid < size || end < size) {
        size_t at = valid < end ? valid : end;
        vlai_finding f = vlai_finding_error("task-text", list->file);
        f.found = vlai_value_whole(index);
        f.hint = "write the text as UTF-8 without zero bytes";
        vlai_report(list->findings, &f, "task %lld: byte %zu of its text is 0x%02x, which is not valid UTF-8 text there",
                    (long long)index, at, (unsigned)(unsigned char)text[at]);
    }
    VLA_TRY(vlai_reserve((void **)&list->tasks, &list->room, list->count, sizeof *list->tasks, err));
    char *copy = vlai_set_strdup(list->set, text);
    if (!copy)
        return vlai_nomem(err, strlen(text));
    if (index != (int64_t)list->count) {
        vlai_finding f = vlai_finding_warning("task-order", list->file);
        f.expected = vlai_value_whole((int64_t)list->count);
        f.found = vlai_value_whole(index);
        vlai_report(list->findings, &f, "row %zu of the tasks carries task_index %lld: LeRobot itself goes by the row, this "
                                        "program by task_index",
                    list->count, (long long)index);
    }
    if (!text[strspn(text, " \t\r\n")]) {
        vlai_finding f = vlai_finding_warning("task-empty", list->file);
        f.found = vlai_value_whole(index);
        vlai_report(list->findings, &f, "task %lld has an empty text", (long long)index);
    }
    list->tasks[list->count++] = (vlai_task){index, copy};
    return VLA_OK;
}

static vla_status add_line(const json_t *object, int64_t line, void *user, vla_error *err)
{
    task_list *list = user;
    const json_t *index = json_object_get(object, "task_index"), *text = json_object_get(object, "task");
    if (json_is_integer(index) && json_is_string(text))
        return add_task(list, json_integer_value(index), json_string_value(text), json_string_length(text), err);
    vlai_finding f = vlai_finding_error("json", list->file);
    f.line = line;
    vlai_report(list->findings, &f, "task_index (a whole number) and task (a text) are needed");
    return VLA_OK;
}

static vla_status read_table(task_list *list, const char *path, vla_error *err)
{
    vlai_parquet *parquet = NULL;
    vlai_parquet_values index = {0}, text = {0};
    vla_error inner = VLA_ERROR_INIT;
    vla_status status = vlai_parquet_open(path, &parquet, &inner);
    if (status == VLA_OK) {
        const vlai_parquet_column *numbers = vlai_parquet_find(parquet, "task_index");
        const vlai_parquet_column *texts = vlai_parquet_find(parquet, "task");
        if (!texts)
            texts = vlai_parquet_find(parquet, "__index_level_0__");
        if (!numbers || !texts) {
            vlai_finding f = vlai_finding_error("column-missing", list->file);
            f.column = numbers ? "task" : "task_index";
            vlai_report(list->findings, &f, "the column '%s' is missing%s", f.column,
                        numbers ? " (neither 'task' nor '__index_level_0__')" : "");
            goto done;
        }
        status = vlai_parquet_read(parquet, numbers, 0, vlai_parquet_rows(parquet), VLAI_PARQUET_I64, &index, &inner);
        if (status == VLA_OK)
            status = vlai_parquet_read(parquet, texts, 0, vlai_parquet_rows(parquet), VLAI_PARQUET_TEXT, &text, &inner);
    }
    if (status == VLA_E_NOMEM) {
        vlai_fail(err, status, "%s", inner.message);
        goto done;
    }
    if (status != VLA_OK) {
        vlai_finding f = vlai_finding_error(vlai_fault_kind(path, status), list->file);
        f.hint = inner.hint[0] ? inner.hint : NULL;
        vlai_report(list->findings, &f, "%s", inner.message);
        status = VLA_OK;
        goto done;
    }
    if (index.nulls || text.nulls || index.count != text.count || index.count != index.rows) {
        vlai_finding f = vlai_finding_error("null", list->file);
        f.column = index.nulls ? "task_index" : "task";
        vlai_report(list->findings, &f, "null in column '%s'", f.column);
        goto done;
    }
    for (int64_t i = 0; i < index.count && status == VLA_OK; i++)
        status = add_task(list, index.i64[i], (const char *)text.bytes[i].data, text.bytes[i].size, err);
done:
    vlai_parquet_values_fini(&index);
    vlai_parquet_values_fini(&text);
    vlai_parquet_close(parquet);
    return status;
}

static int by_index(const void *a, const void *b)
{
    const vlai_task *x = a, *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int by_text(const void *a, const void *b)
{
    const vlai_task *x = a, *y = b;
    int order = strcmp(x->text, y->text);
    return order ? order : by_index(a, b);
}

static void look_for_duplicates(task_list *list)
{
    qsort(list->tasks, list->count, sizeof *list->tasks, by_text);
    for (size_t i = 1; i < list->count; i++)
        if (!strcmp(list->tasks[i].text, list->tasks[i - 1].text)) {
            vlai_finding f = vlai_finding_error("task-duplicate", list->file);
            f.found = vlai_value_text(list->tasks[i].text);
            vlai_report(list->findings, &f, "tasks %lld and %lld have the same text '%s'",
                        (long long)list->tasks[i - 1].index, (long long)list->tasks[i].index, list->tasks[i].text);
        }
    qsort(list->tasks, list->count, sizeof *list->tasks, by_index);
    for (size_t i = 1; i < list->count; i++)
        if (list->tasks[i].index == list->tasks[i - 1].index) {
            vlai_finding f = vlai_finding_error("task-duplicate", list->file);
            f.found = vlai_value_whole(list->tasks[i].index);
            vlai_report(list->findings, &f, "task_index %lld stands twice", (long long)list->tasks[i].index);
        }
}

vla_status vlai_load_tasks(vla_dataset *set, vlai_findings *findings, vla_error *err)
{
    task_list list = {set, findings, set->version == 30 ? "meta/tasks.parquet" : "meta/tasks.jsonl", NULL, 0, 0};
    char path[4096];
    VLA_TRY(vlai_set_path(set, list.file, path, sizeof path, err));
    const char *fault = vlai_file_fault(path);
    if (fault) {
        vlai_finding f = vlai_finding_error(fault, list.file);
        vlai_report(findings, &f, "the file is %s: the instructions cannot be read", vlai_fault_words(fault));
        return VLA_OK;
    }
    vla_status status = set->version == 30 ? read_table(&list, path, err)
                                           : vlai_lines_read(path, list.file, add_line, &list, findings, err);
    if (status == VLA_OK && list.count) {
        look_for_duplicates(&list);
        set->tasks = vlai_arena_alloc(&set->arena, list.count * sizeof *set->tasks);
        if (set->tasks)
            memcpy(set->tasks, list.tasks, list.count * sizeof *set->tasks);
        else
            status = vlai_nomem(err, list.count * sizeof *set->tasks);
        set->task_count = (int64_t)list.count;
        set->tasks_read = true;
        if (set->total_tasks >= 0 && set->total_tasks != set->task_count) {
            vlai_finding f = vlai_finding_warning("count", "meta/info.json");
            f.key = "total_tasks";
            f.expected = vlai_value_whole(set->total_tasks);
            f.found = vlai_value_whole(set->task_count);
            vlai_report(findings, &f, "total_tasks is %lld, the table has %lld", (long long)set->total_tasks,
                        (long long)set->task_count);
        }
    }
    vlai_free(list.tasks);
    return status;
}
