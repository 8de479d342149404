#include "dist/sentences.h"

#include <stdio.h>
#include <string.h>

enum { LINE = 120 };

const char vlai_lost_hint[] = "that rank's own messages say more; the run goes on from its last checkpoint when it is started again";
const char vlai_late_hint[] = "look at what the missing ranks print; VLA_DIST_TIMEOUT or dist.timeout_s sets the limit, in seconds";
const char vlai_differ_hint[] = "every rank must be given the same program, configuration and data";

void vlai_list_ranks(int world, bool (*listed)(const void *context, int rank), const void *context, char out[VLAI_LISTED])
{
    char runs[VLAI_LISTED - 64] = "", last[32] = "";
    int count = 0;
    for (int r = 0; r < world; r++) {
        if (!listed(context, r))
            continue;
        int end = r;
        while (end + 1 < world && listed(context, end + 1))
            end++;
        if (end == r + 1) /* two are named one by one */
            end = r;
        count += end - r + 1;
        size_t n = strlen(runs);
        if (n + 2 * sizeof last > sizeof runs) {
            snprintf(last, sizeof last, "others");
            break;
        }
        if (*last)
            snprintf(runs + n, sizeof runs - n, "%s%s", n ? ", " : "", last);
        if (end == r)
            snprintf(last, sizeof last, "%d", r);
        else
            snprintf(last, sizeof last, "%d-%d", r, end);
        r = end;
    }
    snprintf(out, VLAI_LISTED, "%s %s%s%s", count == 1 ? "rank" : "ranks", runs, *runs ? " and " : "", last);
}

const char *vlai_place(bool met, const char *phase, int64_t step, char out[VLAI_PLACE])
{
    if (!met)
        snprintf(out, VLAI_PLACE, "while the ranks met");
    else if (!*phase)
        snprintf(out, VLAI_PLACE, "in start-up");
    else if (step < 0)
        snprintf(out, VLAI_PLACE, "in phase %s", phase);
    else
        snprintf(out, VLAI_PLACE, "in phase %s, step %lld", phase, (long long)step);
    return out;
}

/* Line number `line` (from 0). */
static void line_of(vlai_lines text, size_t line, char out[LINE + 8])
{
    size_t at = 0;
    for (; line && at < text.size; at++)
        line -= text.data[at] == '\n';
    if (line || at >= text.size) {
        snprintf(out, LINE + 8, "(no line)");
        return;
    }
    size_t n = 0;
    for (; at < text.size && text.data[at] != '\n' && n < LINE; at++, n++)
        out[n] = text.data[at] < 32 || text.data[at] == 127 ? '?' : (char)text.data[at];
    snprintf(out + n, 8, at < text.size && text.data[at] != '\n' ? "..." : "");
}

bool vlai_first_difference(vlai_lines text, vlai_lines of_rank_0, char out[VLAI_LISTED])
{
    if (text.size == of_rank_0.size && (!text.size || memcmp(text.data, of_rank_0.data, text.size) == 0))
        return false;
    size_t line = 0;
    for (size_t i = 0; i < text.size && i < of_rank_0.size && text.data[i] == of_rank_0.data[i]; i++)
        line += text.data[i] == '\n';
    char here[LINE + 8], there[LINE + 8];
    line_of(text, line, here);
    line_of(of_rank_0, line, there);
    snprintf(out, VLAI_LISTED, "'%s' where rank 0 has '%s'", here, there);
    return true;
}
