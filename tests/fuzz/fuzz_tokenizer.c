/* Hostile vocabularies and any text. Input: a tokenizer.json, a zero byte, a text; without a zero byte, all of it is text for
 * a small sound tokenizer. What encodes must decode, and ASCII must come back as it was. */
#include "base/fail.h"
#include "base/json.h"
#include "text/tokenizer.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* All 256 bytes by their characters, a few merges, the pattern of Qwen2. */
static vlai_tokenizer *sound(void)
{
    static vlai_tokenizer *tok;
    if (tok)
        return tok;
    vlai_text json = {0};
    vlai_text_puts(&json,
                   "{\"added_tokens\":[{\"id\":300,\"content\":\"<|a|>\",\"special\":true,\"normalized\":false},"
                   "{\"id\":301,\"content\":\"<|ab|>\",\"normalized\":true},{\"id\":302,\"content\":\"<|a|\",\"normalized\":false,"
                   "\"single_word\":true,\"lstrip\":true,\"rstrip\":true}],\"normalizer\":{\"type\":\"NFC\"},"
                   "\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":"
                   "\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{N}]+"
                   "[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"}},\"model\":{\"vocab\":{");
    for (int id = 0, c = 0; c < 0x144; c++) {
        bool printable = (c > 32 && c < 127) || (c > 0xA0 && c != 0xAD);
        if (printable)
            vlai_text_printf(&json, "\"\\u%04x\":%d,", c, id++);
    }
    vlai_text_puts(&json, "\"ab\":256,\"aa\":257,\"aaa\":258},\"merges\":[\"a b\",\"a a\",\"aa a\"]}}");
    vla_error err = VLA_ERROR_INIT;
    if (json.failed || vlai_tokenizer_parse(json.data, json.size, NULL, 0, "sound", &tok, &err) != VLA_OK)
        __builtin_trap();
    vlai_text_fini(&json);
    return tok;
}

/* `whole`: every byte has a token, so that nothing is dropped; a stripping token drops the space around it. */
static void try_text(const vlai_tokenizer *tok, const char *text, size_t size, bool whole)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_ids ids = {0};
    vlai_text back = {0};
    bool ascii = true;
    for (size_t i = 0; i < size; i++)
        ascii &= (uint8_t)text[i] < 0x80;
    vla_status status = vlai_tokenizer_encode(tok, text, size, &ids, &err);
    if (status != VLA_OK) {
        if (!err.message[0] || (whole && ascii))
            __builtin_trap();
    } else {
        if (vlai_tokenizer_decode(tok, ids.data, ids.count, false, &back, &err) != VLA_OK)
            __builtin_trap();
        bool stripping = false;
        for (size_t i = 0; i < ids.count; i++)
            stripping |= ids.data[i] == 302;
        if (whole && ascii && !stripping && (back.size != size || (size && memcmp(back.data, text, size))))
            __builtin_trap();
    }
    vlai_text_fini(&back);
    vlai_ids_fini(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *zero = size ? memchr(data, 0, size) : NULL;
    if (!zero) {
        try_text(sound(), (const char *)data, size, true);
        return 0;
    }
    vla_error err = VLA_ERROR_INIT;
    vlai_tokenizer *tok;
    const char *text = (const char *)zero + 1;
    size_t text_size = (size_t)((const char *)data + size - text);
    if (vlai_tokenizer_parse((const char *)data, (size_t)(zero - data), NULL, 0, "fuzz", &tok, &err) != VLA_OK) {
        if (!err.message[0] || tok)
            __builtin_trap();
        /* The same bytes as the configuration beside a sound file. */
        static const char plain[] = "{\"model\":{\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}";
        if (vlai_tokenizer_parse(plain, sizeof plain - 1, (const char *)data, (size_t)(zero - data), "fuzz", &tok, &err) != VLA_OK)
            return 0;
    }
    int32_t id;
    if (vlai_tokenizer_add(tok, "<|action|>", &id, &err) == VLA_OK && vlai_tokenizer_id(tok, "<|action|>") != id)
        __builtin_trap();
    try_text(tok, text, text_size < 2000 ? text_size : 2000, false); /* hostile patterns may take quadratic time */
    vlai_tokenizer_close(tok);
    return 0;
}
