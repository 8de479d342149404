/* Golden cases of text: token ids. Prompts and state strings stand in prompt.c. */
#include "parity/parity.h"

#include "base/fail.h"
#include "base/json.h"
#include "text/tokenizer.h"

#include <stdio.h>
#include <string.h>

/* Opens the processor that the options name and adds their tokens. */
static vla_status open_processor(const vlai_parity_case *c, const json_t *options, vlai_tokenizer **out, vla_error *err)
{
    const char *name;
    char path[4096];
    VLA_TRY(vlai_json_string(options, "processor", "", "case.json options", &name, err));
    VLA_TRY(vlai_parity_path(c, name, path, sizeof path, err));
    VLA_TRY(vlai_tokenizer_open(path, out, err));
    size_t i;
    json_t *token;
    json_array_foreach(json_object_get(options, "added_tokens"), i, token) {
        const char *content = json_string_value(token);
        vla_status status = content ? vlai_tokenizer_add(*out, content, NULL, err)
                                    : vlai_fail(err, VLA_E_FORMAT, "case.json: an added token is not a string");
        if (status != VLA_OK)
            return vlai_tokenizer_close(*out), status;
    }
    return VLA_OK;
}

static vla_status compare_item(vlai_parity_case *c, const vlai_tokenizer *tok, size_t i, const json_t *item, vla_error *err)
{
    const json_t *text = json_object_get(item, "text"), *want = json_object_get(item, "ids");
    if (!json_is_string(text) || !json_is_array(want))
        return vlai_fail(err, VLA_E_FORMAT, "items.json: item %zu has no text or no ids", i);
    vlai_ids ids = {0};
    vla_status status = vlai_tokenizer_encode(tok, json_string_value(text), json_string_length(text), &ids, err);
    double wrong = ids.count == json_array_size(want) ? 0 : 1;
    for (size_t k = 0; k < ids.count && k < json_array_size(want); k++)
        wrong += ids.data[k] != json_integer_value(json_array_get(want, k));
    vlai_ids_fini(&ids);
    VLA_TRY(status);
    char name[160];
    snprintf(name, sizeof name, "item %zu: %.120s", i, json_string_value(text));
    vlai_parity_report(c, "ids", name, wrong, vlai_parity_bound(c, "ids"));
    return VLA_OK;
}

vla_status vlai_parity_tokenize(vlai_parity_case *c, vla_error *err)
{
    json_t *items = NULL;
    vlai_tokenizer *tok = NULL;
    VLA_TRY(open_processor(c, json_object_get(c->meta, "options"), &tok, err));
    vla_status status;
    VLA_TRY_GOTO(vlai_parity_json(c, "items.json", &items, err), done);
    size_t i;
    json_t *item, *id;
    json_array_foreach(items, i, item)
        VLA_TRY_GOTO(compare_item(c, tok, i, item, err), done);
    const char *name;
    json_object_foreach(json_object_get(c->meta, "ids_of"), name, id)
        vlai_parity_report(c, "ids_of", name, vlai_tokenizer_id(tok, name) == json_integer_value(id) ? 0 : 1, 0);
    const json_t *want = json_object_get(c->meta, "vocabulary");
    if (want)
        vlai_parity_report(c, "vocabulary", "vocabulary", vlai_tokenizer_size(tok) == json_integer_value(want) ? 0 : 1, 0);
    if ((want = json_object_get(c->meta, "padding_id")))
        vlai_parity_report(c, "padding_id", "padding_id", vlai_tokenizer_pad(tok) == json_integer_value(want) ? 0 : 1, 0);
done:
    json_decref(items);
    vlai_tokenizer_close(tok);
    return status;
}
