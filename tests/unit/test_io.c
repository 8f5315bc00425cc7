/* SPDX-License-Identifier: Apache-2.0
 *
 * test_io.c: tests the reading and writing of files of both formats (src/io/file.h): invalid names, obstacles, and
 * that a file is written completely or not at all. */
#include "io_folder.h"

#include "io/npy.h"
#include "io/safetensors.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

static void non_files_are_refused(void **state)
{
    (void)state;
    npy_file file;
    io_error error;
    assert_false(npy_open(&file, in_folder("missing"), &error));
    assert_non_null(strstr(error.text, "/missing: No such file or directory"));
    assert_false(npy_open(&file, folder, &error));
    assert_non_null(strstr(error.text, ": is a directory, expected a regular file"));
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
    assert_false(npy_open(&file, in_folder("pipe"), &error));
    assert_non_null(strstr(error.text, "/pipe: is a pipe, expected a regular file"));
    assert_false(npy_open(&file, "/dev/null", &error));
    assert_string_equal(error.text, "/dev/null: is a device, expected a regular file");
    write_bytes(in_folder("empty"), "", 0);
    assert_false(npy_open(&file, in_folder("empty"), &error));
    assert_non_null(strstr(error.text, "/empty: is no .npy file"));
    safetensors_file tensors;
    assert_false(safetensors_open(&tensors, folder, &error));
    assert_non_null(strstr(error.text, ": is a directory, expected a regular file"));
    assert_false(safetensors_open(&tensors, in_folder("empty"), &error));
    assert_non_null(strstr(error.text, "/empty: is cut off within the first 8 bytes"));
}

static void names_in_messages_are_one_line(void **state)
{
    (void)state;
    npy_file file;
    io_error error;
    char path[1001];
    memset(path, 'p', 1000);
    path[1000] = '\0';
    assert_false(npy_open(&file, path, &error));
    assert_non_null(strstr(error.text, "ppp: File name too long"));
    assert_memory_equal(error.text, "...ppp", 6);
    assert_false(npy_open(&file, "a\nb\33[2J", &error));
    assert_string_equal(error.text, "a?b?[2J: No such file or directory");
}

static const float NEW[2] = {3, 4};

static cot_tensor two_floats(void)
{
    return cot_tensor_contiguous((void *)NEW, COT_F32, 1, SHAPE(2));
}

static void unwritable_paths_are_refused(void **state)
{
    (void)state;
    const cot_tensor t = two_floats();
    io_error error;
    char names[256];
    assert_false(npy_write("", &t, &error));
    assert_string_equal(error.text, "\"\": is no file name");
    assert_false(npy_write(folder, &t, &error));
    assert_non_null(strstr(error.text, ": is a directory, expected a regular file or none"));
    assert_false(npy_write("/dev/full", &t, &error));
    assert_string_equal(error.text, "/dev/full: is a device, expected a regular file or none");
    assert_false(npy_write(in_folder("missing/a.npy"), &t, &error));
    assert_non_null(strstr(error.text, "missing/a.npy: cannot be written: No such file or directory"));
    assert_int_equal(list_folder(names, sizeof names), 0);
    assert_int_equal(mkfifo(in_folder("a.npy.partial"), 0600), 0);
    assert_false(npy_write(in_folder("a.npy"), &t, &error));
    assert_non_null(strstr(error.text, "a.npy.partial: is in the way: it is a pipe"));
}

/* The partial file of a killed process is overwritten. That of a running process is kept. */
static void partial_files_of_others(void **state)
{
    (void)state;
    const cot_tensor t = two_floats();
    io_error error;
    char names[256], text[64];
    write_bytes(in_folder("a.npy.partial"),
                "left behind, and longer than the file that comes after it is going to be: "
                "........................................................................",
                146);
    assert_true(npy_write(in_folder("a.npy"), &t, &error));
    npy_file file;
    assert_true(npy_open(&file, in_folder("a.npy"), &error));
    npy_close(&file);
    list_folder(names, sizeof names);
    assert_string_equal(names, "a.npy");

    write_bytes(in_folder("b.npy.partial"), "alive", 5);
    const int fd = open(in_folder("b.npy.partial"), O_RDWR);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_false(npy_write(in_folder("b.npy"), &t, &error));
    assert_non_null(strstr(error.text, "b.npy: another process is writing it"));
    close(fd);
    assert_int_equal(read_bytes(in_folder("b.npy.partial"), text, sizeof text), 5);
}

/* Calls `write` with a limit on the file size, as on a full disk. */
static bool write_with_limit(rlim_t limit, bool (*write)(io_error *), io_error *error)
{
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){limit, before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    const bool good = write(error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    return good;
}

enum { LARGE = 100000 };

static cot_tensor large(void)
{
    static float data[LARGE];
    return cot_tensor_contiguous(data, COT_F32, 1, SHAPE(LARGE));
}

static bool write_large_npy(io_error *error)
{
    const cot_tensor t = large();
    return npy_write(in_folder("a"), &t, error);
}

static bool write_large_safetensors(io_error *error)
{
    const safetensors_item item = {"a", large()};
    return safetensors_write(in_folder("a"), &item, 1, NULL, error);
}

static void a_full_disk_leaves_the_old_file(void **state)
{
    (void)state;
    bool (*const writers[])(io_error *) = {write_large_npy, write_large_safetensors};
    static const rlim_t rooms[] = {0, 5, 64, 100, 4096, 399999};
    for (size_t w = 0; w < COUNT(writers); w++) {
        for (size_t r = 0; r < COUNT(rooms); r++) {
            io_error error;
            char names[256], text[16];
            write_bytes(in_folder("a"), "the old one", 11);
            assert_false(write_with_limit(rooms[r], writers[w], &error));
            assert_non_null(strstr(error.text, "/a: cannot be written: File too large"));
            assert_int_equal(read_bytes(in_folder("a"), text, sizeof text), 11);
            assert_memory_equal(text, "the old one", 11);
            list_folder(names, sizeof names);
            assert_string_equal(names, "a");
        }
        io_error error;
        char text[16];
        assert_true(write_with_limit(500000, writers[w], &error));
        assert_int_equal(read_bytes(in_folder("a"), text, sizeof text), sizeof text);
        assert_memory_not_equal(text, "the old one", 11);
    }
}

/* ---- several files at once
 * ----------------------------------------------------------------------------------------- */

static void prepare_three(io_writer writers[3])
{
    const cot_tensor t = two_floats();
    io_error error;
    static const char *const names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++)
        if (!npy_prepare(&writers[i], in_folder(names[i]), &t, &error))
            fail_msg("%s", error.text);
}

static void several_files_are_published_together(void **state)
{
    (void)state;
    io_writer writers[3];
    io_error error;
    npy_file file;
    char names[256], text[16];
    write_bytes(in_folder("b"), "old", 3);
    prepare_three(writers);
    assert_int_equal(read_bytes(in_folder("b"), text, sizeof text), 3);
    assert_int_equal(list_folder(names, sizeof names), 4); /* three partial files and the old b */
    assert_true(io_publish(writers, 3, &error));
    assert_int_equal(list_folder(names, sizeof names), 3);
    assert_true(npy_open(&file, in_folder("b"), &error));
    assert_memory_equal(file.tensor.data, NEW, sizeof NEW);
    npy_close(&file);
}

static void a_failure_publishes_no_file(void **state)
{
    (void)state;
    io_writer writers[3];
    io_error error;
    char names[256], text[16];
    write_bytes(in_folder("b"), "old", 3); /* a is new, b is replaced, c fails */
    prepare_three(writers);
    assert_int_equal(unlink(in_folder("c.partial")), 0);
    assert_false(io_publish(writers, 3, &error));
    assert_non_null(strstr(error.text, "/c: cannot be put in place: No such file or directory"));
    list_folder(names, sizeof names);
    assert_string_equal(names, "b");
    assert_int_equal(read_bytes(in_folder("b"), text, sizeof text), 3);
    assert_memory_equal(text, "old", 3);
}

static void abandoned_files_are_gone(void **state)
{
    (void)state;
    io_writer writers[3];
    char names[256];
    prepare_three(writers);
    for (int i = 0; i < 3; i++) {
        io_abandon(&writers[i]);
        io_abandon(&writers[i]); /* has no effect */
    }
    assert_int_equal(list_folder(names, sizeof names), 0);
}

/* A mapped file remains readable after it is replaced. */
static void replacing_a_mapped_file(void **state)
{
    (void)state;
    static const float old[2] = {1, 2};
    const cot_tensor before = cot_tensor_contiguous((void *)old, COT_F32, 1, SHAPE(2)), after = two_floats();
    io_error error;
    npy_file file;
    assert_true(npy_write(in_folder("a"), &before, &error) && npy_open(&file, in_folder("a"), &error));
    assert_true(npy_write(in_folder("a"), &after, &error));
    assert_memory_equal(file.tensor.data, old, sizeof old);
    npy_close(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_FOLDER(non_files_are_refused),           cmocka_unit_test(names_in_messages_are_one_line),
        IN_FOLDER(unwritable_paths_are_refused),    IN_FOLDER(partial_files_of_others),
        IN_FOLDER(a_full_disk_leaves_the_old_file), IN_FOLDER(several_files_are_published_together),
        IN_FOLDER(a_failure_publishes_no_file),     IN_FOLDER(abandoned_files_are_gone),
        IN_FOLDER(replacing_a_mapped_file),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
