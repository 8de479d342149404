/* vla report: one page, closed in itself, with the run's numbers in it. */
#include "folder.h"

#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"
#include "format/image.h"
#include "train/compare.h"
#include "train/report.h"

#include <ctype.h>
#include <math.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static vla_error err = VLA_ERROR_INIT;

static void put(const char *name, const char *text)
{
    assert_ok(vlai_write_file_atomic(at(name), text, strlen(text), &err), err);
}

/* Every element that is opened is closed, in order; those that HTML leaves open are listed. Text is free of '<'. */
static void assert_well_formed(const char *html)
{
    static const char *const single[] = {"!doctype", "meta", "line", "path", "img", "br"};
    char open[64][16];
    int depth = 0;
    for (const char *c = strchr(html, '<'); c; c = strchr(c, '<')) {
        const char *name = c[1] == '/' ? c + 2 : c + 1;
        size_t n = strcspn(name, " />\n");
        bool closing = c[1] == '/', alone = false;
        assert_true(n > 0 && n < 16 && (isalpha((unsigned char)*name) || *name == '!'));
        for (size_t i = 0; i < sizeof single / sizeof *single; i++)
            alone |= strlen(single[i]) == n && !strncmp(single[i], name, n);
        if (closing) {
            assert_true(depth > 0);
            depth--;
            if (strncmp(open[depth], name, n) != 0 || open[depth][n])
                fail_msg("</%.*s> closes <%s>", (int)n, name, open[depth]);
        } else if (!alone) {
            assert_true(depth < 64);
            snprintf(open[depth++], 16, "%.*s", (int)n, name);
        }
        /* quotation marks may hold anything */
        char quote = 0;
        while (*c && (quote || *c != '>')) {
            if (quote ? *c == quote : *c == '\'' || *c == '"')
                quote = quote ? 0 : *c;
            c++;
        }
        assert_true(*c == '>');
    }
    assert_int_equal(depth, 0);
}

static char *write_page(vlai_report_summary *s)
{
    char *html;
    size_t size;
    assert_ok(vlai_report_write(at("run"), NULL, s, &err), err);
    assert_ok(vlai_read_file(s->path, 0, &html, &size, &err), err);
    assert_int_equal(size, s->bytes);
    return html;
}

static void a_page_of_a_long_run(void **state)
{
    (void)state;
    vlai_text text = {0};
    enum { STEPS = 30000 };
    for (int i = 1; i <= STEPS; i++)
        vlai_text_printf(&text,
                         "{\"step\": %d, \"samples\": %d, \"loss\": %.6f, \"flow_loss\": %.6f, \"lr\": %g, \"grad_norm\": %g, "
                         "\"step_ms\": 100, \"stall_ms\": 5, \"samples_per_s\": 320, \"rss\": 2500000000, \"device_memory\": 0, \"skipped\": %s}\n",
                         i, 32 * i, 1.0 / i, 1.0 / i, 1e-4, 2.0, i == 7 ? "true" : "false");
    vlai_text_puts(&text, "not JSON\n{\"step\": 30001, \"lo"); /* a killed run's last line */
    assert_ok(vlai_text_status(&text, &err), err);
    assert_ok(vlai_mkdirs(at("run/predict"), &err), err);
    put("run/metrics.jsonl", text.data);
    vlai_text_fini(&text);
    put("run/validation.jsonl", "{\"step\": 100, \"loss\": 0.5, \"seconds\": 1}\n{\"step\": 30000, \"loss\": 0.25}\n");
    put("run/config.resolved.json", "{\"data\": {\"lerobot_config\": {\"repo_id\": \"a<b>&\\\"c\"}}, \"model\": {}}");
    put("run/predict/summary.json",
        "{\"step\": 30000, \"predictions\": 12, \"overall\": {\"l1\": 0.125, \"mse\": 0.5, \"mean_action_l1\": 0.5},"
        "\"dimensions\": [{\"name\": \"<script>\", \"l1\": 0.125, \"mse\": 0.5, \"mean_action_l1\": 0.5}],"
        "\"horizon_steps\": [{\"step\": 0, \"l1\": 0.1, \"mse\": 0.2, \"mean_action_l1\": 0.4}], \"episodes\": [{\"episode\": 3}, {\"episode\": 4}]}");
    static const uint8_t pixels[2 * 2 * 3] = {255, 0, 0};
    assert_ok(vlai_png_write(at("run/predict/ep3.png"), pixels, 2, 2, &err), err);
    vlai_report_summary s;
    char *html = write_page(&s);
    assert_int_equal(s.steps, STEPS);
    assert_int_equal(s.validations, 2);
    assert_int_equal(s.pictures, 1); /* ep4 was not drawn */
    assert_int_equal(s.bad_lines, 1);
    assert_true(s.bytes < 400000); /* 30,000 steps are thinned */
    assert_well_formed(html);
    assert_null(strstr(html, "http"));
    assert_null(strstr(html, "<script"));
    assert_null(strstr(html, "<link"));
    assert_null(strstr(html, "nan"));
    assert_non_null(strstr(html, "&lt;script&gt;"));
    assert_non_null(strstr(html, "a&lt;b&gt;&amp;&quot;c"));
    assert_non_null(strstr(html, "src=\"data:image/png;base64,iVBORw0KGgo")); /* the signature of PNG */
    assert_non_null(strstr(html, "<b>30000</b><span>steps"));
    assert_non_null(strstr(html, "<b>960000</b><span>samples seen"));
    assert_non_null(strstr(html, "<b>320</b><span>samples per second, median"));
    assert_non_null(strstr(html, "<b>5 %</b><span>waiting for data"));
    assert_non_null(strstr(html, "<b>2.5 GB</b><span>largest resident memory"));
    assert_non_null(strstr(html, "<b>0.25</b><span>newest validation loss"));
    assert_non_null(strstr(html, "<b>1</b><span>steps skipped"));
    assert_non_null(strstr(html, "<b>0.250</b><span>prediction error"));
    assert_null(strstr(html, "device memory"));
    vlai_free(html);
}

/* Rates by group, losses by data set and norms of weights have charts of their own, with a curve for each; more than four groups
 * have four. */
static void a_page_of_groups(void **state)
{
    (void)state;
    vlai_text text = {0};
    assert_ok(vlai_mkdirs(at("run"), &err), err);
    for (int i = 1; i <= 201; i++) {
        vlai_text_printf(&text, "{\"step\": %d, \"loss\": %.6f, \"lr\": 0.1, \"channel_loss_/data/a<b>\": 2, \"channel_loss_/data/a<b>_flow\": %.6f, \"rss\": 1, ", i,
                         1.0 / i, 1.0 / i);
        for (int g = 0; g < 6; g++)
            vlai_text_printf(&text, "\"lr_group/group%d\": %g, ", g, 0.1 * g);
        if (i % 100 == 1)
            vlai_text_printf(&text, "\"visual_param_norm\": 3.5, \"total_param_norm\": %d, ", 4 + i);
        vlai_text_puts(&text, "\"skipped\": 0}\n");
    }
    assert_ok(vlai_text_status(&text, &err), err);
    put("run/metrics.jsonl", text.data);
    vlai_text_fini(&text);
    vlai_report_summary s;
    char *html = write_page(&s);
    assert_int_equal(s.steps, 201);
    assert_int_equal(s.bad_lines, 0);
    assert_well_formed(html);
    assert_null(strstr(html, "nan"));
    assert_non_null(strstr(html, "Loss by data set"));
    assert_non_null(strstr(html, "/data/a&lt;b&gt;_flow"));
    assert_non_null(strstr(html, "group3"));
    assert_null(strstr(html, "group4"));
    char *norms = strstr(html, "Norm of the weights"), *end = strstr(norms, "</figure>");
    assert_non_null(norms);
    *end = 0;
    assert_non_null(strstr(norms, "visual"));
    assert_non_null(strstr(norms, "total"));
    int dots = 0;
    for (char *c = norms; (c = strstr(c, "<circle")); c++)
        dots++;
    assert_int_equal(dots, 6); /* two norms in steps 1, 101, 201 */
    vlai_free(html);
    assert_ok(vlai_remove_tree(at("run"), &err), err);
}

/* One step, values that are null, nothing else in the folder. */
static void a_page_of_little(void **state)
{
    (void)state;
    assert_ok(vlai_remove_tree(at("run"), &err), err);
    assert_ok(vlai_mkdirs(at("run"), &err), err);
    put("run/metrics.jsonl", "{\"step\": 1, \"loss\": null, \"lr\": 0.1, \"rss\": 1}\n");
    vlai_report_summary s;
    char *html = write_page(&s);
    assert_int_equal(s.steps, 1);
    assert_well_formed(html);
    assert_null(strstr(html, "nan"));
    vlai_free(html);
}

/* Predictions that cannot be read keep nothing else from the page; both it and the program name the file. */
static void a_page_without_what_is_damaged(void **state)
{
    (void)state;
    static const char *const contents[] = {"{\"step\": 30000, \"predic", "[1, 2]", ""};
    assert_ok(vlai_mkdirs(at("damaged/predict"), &err), err);
    put("damaged/metrics.jsonl", "{\"step\": 7, \"loss\": 0.5, \"lr\": 0.1, \"rss\": 1}\n");
    put("damaged/config.resolved.json", "{\"logging\": {\"log_name\": \"a name\"}}");
    for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
        vlai_report_summary s;
        char *html, command[4096];
        size_t size;
        put("damaged/predict/summary.json", contents[i]);
        assert_ok(vlai_report_write(at("damaged"), NULL, &s, &err), err);
        assert_int_equal(s.damaged_count, 1);
        assert_non_null(strstr(s.damaged[0].message, "damaged/predict/summary.json"));
        assert_ok(vlai_read_file(at("damaged/report.html"), 0, &html, &size, &err), err);
        assert_well_formed(html);
        assert_non_null(strstr(html, "<b>7</b><span>steps"));
        assert_non_null(strstr(html, "Training run a name"));
        assert_non_null(strstr(html, "left out: "));
        assert_null(strstr(html, "<h2>Predictions"));
        vlai_free(html);
        snprintf(command, sizeof command, "'%s' report '%s' 2>&1 >/dev/null | grep -q '^vla report: left out: .*damaged/predict/summary.json'",
                 VLA_TEST_PROGRAM, at("damaged"));
        assert_int_equal(WEXITSTATUS(system(command)), 0);
        snprintf(command, sizeof command, "'%s' report '%s' >/dev/null 2>&1", VLA_TEST_PROGRAM, at("damaged"));
        assert_int_equal(WEXITSTATUS(system(command)), 0);
    }
    put("damaged/config.resolved.json", "{");
    vlai_report_summary s;
    assert_ok(vlai_report_write(at("damaged"), NULL, &s, &err), err);
    assert_int_equal(s.damaged_count, 2);
    /* What may not be read, unless by root. */
    put("damaged/predict/summary.json", "{\"episodes\": []}");
    put("damaged/config.resolved.json", "{}");
    static const char *const locked[] = {"damaged/validation.jsonl", "damaged/bench.jsonl", "damaged/predict/horizon.png"};
    for (size_t i = 0; i < sizeof locked / sizeof *locked; i++) {
        put(locked[i], "x");
        assert_int_equal(chmod(at(locked[i]), 0), 0);
    }
    bool bars = access(at("damaged/bench.jsonl"), R_OK) != 0;
    assert_ok(vlai_report_write(at("damaged"), NULL, &s, &err), err);
    assert_int_equal(s.damaged_count, bars ? 3 : 0);
    for (size_t i = 0; i < sizeof locked / sizeof *locked; i++)
        assert_int_equal(unlink(at(locked[i])), 0);
    put("damaged/predict/summary.json", "");
    put("damaged/metrics.jsonl", "");
    assert_fails(vlai_report_write(at("damaged"), NULL, &s, &err), VLA_E_FORMAT, err, "predict/summary.json");
}

/* What `vla bench` wrote, and lines that it did not. */
static void a_page_of_measurements(void **state)
{
    (void)state;
    assert_ok(vlai_mkdirs(at("measured"), &err), err);
    put("measured/bench.jsonl",
        "{\"kind\": \"machine\", \"device\": \"<A card>\", \"date\": \"2026-01-31\", \"copy_gb_per_s\": 4000, \"gemm_tflops\": 670, \"memory_limit_gb\": 97.9}\n"
        "{\"kind\": \"step\", \"variant\": \"all switches\", \"numerics\": \"bf16\", \"batch\": 26, \"global_batch\": 26, \"oom\": false, \"step_ms\": 400.5,"
        " \"samples_per_s\": 64.9, \"tflops\": 448, \"mfu\": 0.453, \"device_gb_own\": 91.25, \"loss\": {\"1\": 0.75, \"5\": 0.5},"
        " \"profile\": {\"ops\": {\"add\": {\"ms\": 25}, \"matmul\": {\"ms\": 75}}}}\n"
        "[1]\nnot JSON\n{\"kind\": 7}\n"
        "{\"kind\": \"step\", \"variant\": \"all switches\", \"numerics\": \"bf16\", \"batch\": 64, \"global_batch\": 64, \"oom\": true}\n{\"kind\": \"st");
    vlai_report_summary s;
    assert_ok(vlai_report_write(at("measured"), NULL, &s, &err), err);
    size_t size;
    char *html;
    assert_ok(vlai_read_file(at("measured/report.html"), 0, &html, &size, &err), err);
    assert_well_formed(html);
    assert_null(strstr(html, "nan"));
    assert_non_null(strstr(html, "&lt;A card&gt;, 2026-01-31; copy 4000 GB/s"));
    assert_non_null(strstr(html, "<td>400.50</td><td>64.90</td><td>448</td><td>45.3 %</td><td>&ndash;</td><td>91.25</td><td>&ndash;</td><td>&ndash;</td><td>0.75 / 0.5</td>"));
    assert_non_null(strstr(html, "<td>64</td><td>64</td><td colspan=9>out of memory</td>"));
    const char *product = strstr(html, "<td>matmul</td><td>75.000</td><td>75.0 %</td>"), *sum = strstr(html, "<td>add</td><td>25.000</td>");
    assert_true(product && sum && product < sum);
    vlai_free(html);
}

static void says_what_is_wrong(void **state)
{
    (void)state;
    vlai_report_summary s;
    assert_fails(vlai_report_write(at("nowhere"), NULL, &s, &err), VLA_E_NOT_FOUND, err, "no such run folder");
    assert_ok(vlai_mkdirs(at("empty"), &err), err);
    assert_fails(vlai_report_write(at("empty"), NULL, &s, &err), VLA_E_NOT_FOUND, err, "metrics.jsonl");
    char command[4096];
    snprintf(command, sizeof command, "'%s' report '%s' >/dev/null 2>&1", VLA_TEST_PROGRAM, at("nowhere"));
    assert_int_equal(WEXITSTATUS(system(command)), 3);
    snprintf(command, sizeof command, "'%s' report '%s' --out '%s' >/dev/null", VLA_TEST_PROGRAM, at("run"), at("page.html"));
    assert_int_equal(WEXITSTATUS(system(command)), 0);
    assert_true(vlai_is_file(at("page.html")));
    static const char *const refused[] = {"--rtol -1", "--out page.html"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        snprintf(command, sizeof command, "'%s' report '%s' --against '%s' %s >/dev/null 2>&1", VLA_TEST_PROGRAM, at("run"), at("run"), refused[i]);
        assert_int_equal(WEXITSTATUS(system(command)), 2);
    }
    /* What is no file is not replaced by one. */
    struct stat st;
    assert_int_equal(mkfifo(at("pipe"), 0600), 0);
    assert_fails(vlai_report_write(at("run"), at("pipe"), &s, &err), VLA_E_INVALID, err, "pipe: a device, a pipe or an open file");
    assert_int_equal(lstat(at("pipe"), &st), 0);
    assert_true(S_ISFIFO(st.st_mode));
    assert_int_equal(symlink("/proc/self/fd/1", at("output")), 0);
    assert_fails(vlai_report_write(at("run"), at("output"), &s, &err), VLA_E_INVALID, err, "output: a device");
}

static int against(const char *first, const char *second, double rtol, vlai_comparison *c)
{
    put("first.jsonl", first);
    put("second.jsonl", second);
    return (int)vlai_compare_runs(at("first.jsonl"), at("second.jsonl"), rtol, c, &err);
}

/* Two runs side by side: equal, within a tolerance, the first step that is not, values that are not finite, steps of one alone. */
static void two_runs(void **state)
{
    (void)state;
    vlai_comparison c;
    static const char run[] = "{\"step\": 1, \"loss\": 2, \"grad_norm\": 4, \"skipped\": 0}\n{\"step\": 2, \"loss\": null, \"grad_norm\": null, \"skipped\": 1}\n"
                              "{\"step\": 3, \"loss\": 1, \"grad_norm\": 0, \"skipped\": 0}\n";
    assert_int_equal(against(run, run, 0, &c), VLA_OK);
    assert_true(c.same && c.steps == 3 && c.worst == 0);
    assert_string_equal(c.text, "PASS: 3 steps, loss and grad_norm within 0 (at most 0 apart)");
    /* 2.5 and 2 are 0.25 of the first apart; the second file is longer, and its last line was cut */
    static const char other[] = "{\"step\": 1, \"loss\": 2.5, \"grad_norm\": 4, \"skipped\": 0}\n{\"step\": 2, \"loss\": null, \"grad_norm\": null, \"skipped\": 1}\n"
                                "{\"step\": 3, \"loss\": 1, \"grad_norm\": 0, \"skipped\": 0}\n{\"step\": 4, \"loss\": 1}\n{\"step\": 5, \"lo";
    assert_int_equal(against(run, other, 0.2, &c), VLA_OK);
    assert_true(!c.same && c.first == 1 && c.worst == 0.25 && c.alone[0] == 0 && c.alone[1] == 1);
    assert_string_equal(c.text, "FAIL: step 1: loss 2 and 2.5, 0.25 apart, where 0.2 is allowed; the first of 3 steps that differs; not compared: 1 step of the second");
    assert_int_equal(against(run, other, 0.25, &c), VLA_OK);
    assert_true(c.same);
    /* what one run skipped and the other did not differs at any tolerance; so does a norm that was 0 */
    assert_int_equal(against(run, "{\"step\": 2, \"loss\": 3, \"grad_norm\": 1, \"skipped\": 0}\n", 1e9, &c), VLA_OK);
    assert_true(!c.same && c.first == 2 && c.steps == 1 && c.alone[0] == 2);
    assert_int_equal(against(run, "{\"step\": 3, \"loss\": 1, \"grad_norm\": 1, \"skipped\": 0}\n", 1e9, &c), VLA_OK);
    assert_true(!c.same && c.first == 3);
    assert_int_equal(against(run, "{\"step\": 9, \"loss\": 1}\n", 0, &c), VLA_E_INVALID);
    assert_non_null(strstr(err.message, "no step in common: 3 and 1"));
    assert_int_equal(against(run, "nothing\n{\"step\": 1}\n", 0, &c), VLA_E_FORMAT);
    assert_non_null(strstr(err.message, "second.jsonl:1: no record"));
    assert_int_equal((int)vlai_compare_runs(at("first.jsonl"), at("nowhere"), 0, &c, &err), VLA_E_NOT_FOUND);
    /* zeros, which a file system leaves where power failed, end neither file */
    static const char zeros[] = "{\"step\": 1, \"loss\": 2}\n\0\0\0\n{\"step\": 2, \"loss\": 3}\n";
    assert_ok(vlai_write_file_atomic(at("second.jsonl"), zeros, sizeof zeros - 1, &err), err);
    assert_fails(vlai_compare_runs(at("first.jsonl"), at("second.jsonl"), 0, &c, &err), VLA_E_FORMAT, err, "second.jsonl:2: no record");
    assert_ok(vlai_mkdirs(at("zeros"), &err), err);
    assert_ok(vlai_write_file_atomic(at("zeros/metrics.jsonl"), zeros, sizeof zeros - 1, &err), err);
    vlai_report_summary s;
    assert_ok(vlai_report_write(at("zeros"), NULL, &s, &err), err);
    assert_true(s.steps == 2 && s.bad_lines == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_page_of_a_long_run),
        cmocka_unit_test(a_page_of_groups),
        cmocka_unit_test(a_page_of_little),
        cmocka_unit_test(a_page_of_measurements),
        cmocka_unit_test(a_page_without_what_is_damaged),
        cmocka_unit_test(two_runs),
        cmocka_unit_test(says_what_is_wrong),
    };
    return cmocka_run_group_tests_name("report", tests, make_root, drop_root);
}
