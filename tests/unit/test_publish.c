/* SPDX-License-Identifier: Apache-2.0
 *
 * test_publish.c: tests the guarantees of io_publish (src/io/file.h): when the file system fails, when it lacks hard
 * links, locks and the exchange of names, and when the process ends. The linker replaces functions of the C library by
 * those below (--wrap). They record each call, and the chosen call fails or ends the process. */
#include "io_folder.h"

#include "io/npy.h"

#include <errno.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* ---- the file system ------------------------------------------------------------------------------------------ */

enum { FILES = 3, ALL_LATER = 1 << 20 };

typedef enum operation { NONE, RENAME, LINK, UNLINK, FSYNC, ANY } operation;

static struct {
    bool is_on;
    operation failing; /* kind of the calls that fail */
    int first, last;   /* range of their numbers within that kind */
    int exit_before;   /* the process ends before the call of this number, counted over all kinds */
    bool has_links, has_locks;
    int calls[ANY + 1];
    char trace[4096];
} disk;

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Records a call. Returns whether it fails. */
static bool record_call(operation kind, const char *what, const char *name, const char *other)
{
    if (!disk.is_on)
        return false;
    const size_t length = strlen(disk.trace);
    snprintf(disk.trace + length, sizeof disk.trace - length, "%s %s%s%s\n", what, name, other[0] != '\0' ? " " : "",
             other);
    if (disk.calls[ANY]++ == disk.exit_before)
        _exit(0);
    const int number = disk.calls[kind]++;
    errno = EIO;
    return kind == disk.failing && number >= disk.first && number <= disk.last;
}

int __real_rename(const char *from, const char *to);
int __real_link(const char *from, const char *to);
int __real_unlink(const char *path);
int __real_fsync(int fd);
int __real_flock(int fd, int what);
int __wrap_rename(const char *from, const char *to);
int __wrap_renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags);
int __wrap_link(const char *from, const char *to);
int __wrap_unlink(const char *path);
int __wrap_fsync(int fd);
int __wrap_flock(int fd, int what);

int __wrap_rename(const char *from, const char *to)
{
    return record_call(RENAME, "rename", base_name(from), base_name(to)) ? -1 : __real_rename(from, to);
}

/* Without RENAME_EXCHANGE, as on NFS. */
int __wrap_renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags)
{
    (void)from_folder, (void)to_folder;
    errno = EINVAL;
    return flags == 0 ? __wrap_rename(from, to) : -1;
}

int __wrap_link(const char *from, const char *to)
{
    if (record_call(LINK, "link", base_name(from), base_name(to)))
        return -1;
    errno = EPERM;
    return disk.is_on && !disk.has_links && access(from, F_OK) == 0 ? -1 : __real_link(from, to);
}

int __wrap_unlink(const char *path)
{
    return record_call(UNLINK, "unlink", base_name(path), "") ? -1 : __real_unlink(path);
}

int __wrap_fsync(int fd)
{
    char link_name[64], path[256] = "";
    snprintf(link_name, sizeof link_name, "/proc/self/fd/%d", fd);
    if (readlink(link_name, path, sizeof path - 1) < 0)
        fail_msg("fsync of no file");
    return record_call(FSYNC, "fsync", strcmp(path, folder) == 0 ? "FOLDER" : base_name(path), "") ? -1
                                                                                                   : __real_fsync(fd);
}

int __wrap_flock(int fd, int what)
{
    errno = ENOLCK;
    return disk.is_on && !disk.has_locks ? -1 : __real_flock(fd, what);
}

static void disk_begin(bool has_links)
{
    memset(&disk, 0, sizeof disk);
    disk.is_on = disk.has_locks = true;
    disk.has_links = has_links;
    disk.exit_before = -1;
}

static void disk_end(void)
{
    disk.is_on = false;
}

/* ---- three files ---------------------------------------------------------------------------------------------- */

static const char *const NAMES[FILES] = {"a", "b", "c"};
static const float NEW[2] = {3, 4};
static const char OLD[] = "the old one";

/* Creates the old files whose bits are set in `existing`, with special permissions. */
static void make_old_files(unsigned existing)
{
    empty_folder(NULL);
    for (int i = 0; i < FILES; i++) {
        if ((existing >> i & 1) == 0)
            continue;
        write_bytes(in_folder(NAMES[i]), OLD, sizeof OLD - 1);
        assert_int_equal(chmod(in_folder(NAMES[i]), 0604), 0);
    }
}

static bool publish_three(io_error *error)
{
    const cot_tensor t = cot_tensor_contiguous((void *)NEW, COT_F32, 1, SHAPE(2));
    io_writer writers[FILES];
    for (int i = 0; i < FILES; i++)
        if (!npy_prepare(&writers[i], in_folder(NAMES[i]), &t, error)) {
            while (i > 0)
                io_abandon(&writers[--i]);
            return false;
        }
    return io_publish(writers, FILES, error);
}

typedef enum content { NOTHING, WHOLE_OLD, WHOLE_NEW, BROKEN } content;

static content content_of(const char *name)
{
    char bytes[512];
    if (access(in_folder(name), F_OK) != 0)
        return NOTHING;
    const size_t size = read_bytes(in_folder(name), bytes, sizeof bytes);
    if (size == sizeof OLD - 1 && memcmp(bytes, OLD, size) == 0)
        return WHOLE_OLD;
    return size == 128 + sizeof NEW && memcmp(bytes + 128, NEW, sizeof NEW) == 0 ? WHOLE_NEW : BROKEN;
}

/* Asserts that only the old files exist, unchanged. */
static void assert_as_before(unsigned existing)
{
    char names[256];
    int count = 0;
    for (int i = 0; i < FILES; i++) {
        struct stat information;
        const bool existed = existing >> i & 1;
        assert_int_equal(content_of(NAMES[i]), existed ? WHOLE_OLD : NOTHING);
        count += existed;
        if (existed) {
            assert_int_equal(stat(in_folder(NAMES[i]), &information), 0);
            assert_int_equal(information.st_mode & 07777, 0604);
        }
    }
    assert_int_equal(list_folder(names, sizeof names), count);
}

static void assert_all_new(unsigned existing)
{
    char names[256];
    for (int i = 0; i < FILES; i++) {
        struct stat information;
        assert_int_equal(content_of(NAMES[i]), WHOLE_NEW);
        assert_int_equal(stat(in_folder(NAMES[i]), &information), 0);
        if (existing >> i & 1)
            assert_int_equal(information.st_mode & 07777, 0604);
    }
    assert_int_equal(list_folder(names, sizeof names), FILES);
}

/* ---- failures --------------------------------------------------------------------------------------------------- */

/* Every call of every kind fails once, for every set of existing files, with and without hard links. Either all
 * files or no files are replaced. */
static void one_call_fails(void **state)
{
    (void)state;
    int failures = 0;
    for (int has_links = 0; has_links < 2; has_links++)
        for (unsigned existing = 0; existing < 1u << FILES; existing++)
            for (operation kind = RENAME; kind <= FSYNC; kind++) {
                bool reached = true;
                for (int n = 0; reached; n++) {
                    io_error error;
                    make_old_files(existing);
                    disk_begin(has_links);
                    disk.failing = kind;
                    disk.first = disk.last = n;
                    const bool good = publish_three(&error);
                    disk_end();
                    reached = disk.calls[kind] > n;
                    if (good && reached && kind == UNLINK) /* an extra hard link may remain */
                        for (int i = 0; i < FILES; i++)
                            assert_int_equal(content_of(NAMES[i]), WHOLE_NEW);
                    else if (good)
                        assert_all_new(existing);
                    else
                        assert_as_before(existing);
                    assert_true(good || reached);
                    if (reached && (kind == RENAME || kind == FSYNC))
                        assert_false(good);
                    failures += !good;
                }
            }
    assert_true(failures >= 2 * 8 * (3 + 6)); /* three renames, six fsyncs */
}

/* From one rename on, all renames fail, so that the old files cannot be restored. Each old file is kept, and the
 * message names it. */
static void renames_stop_working(void **state)
{
    (void)state;
    for (int has_links = 0; has_links < 2; has_links++)
        for (int n = 0; n < FILES; n++) {
            io_error error;
            make_old_files(7);
            disk_begin(has_links);
            disk.failing = RENAME;
            disk.first = n;
            disk.last = ALL_LATER;
            assert_false(publish_three(&error));
            disk_end();
            for (int i = 0; i < FILES; i++) {
                char backup[64], text[128];
                snprintf(backup, sizeof backup, "%s.partial.old", NAMES[i]);
                snprintf(text, sizeof text, "/%s is the new file, the old one is ", NAMES[i]);
                assert_int_equal(content_of(NAMES[i]), i < n ? WHOLE_NEW : WHOLE_OLD);
                assert_int_equal(content_of(backup), i < n ? WHOLE_OLD : NOTHING);
                assert_int_equal(strstr(error.text, text) != NULL, i < n);
            }
            assert_true(publish_three(&error)); /* leftover files do not disturb the next call */
            assert_all_new(7);
        }
}

/* The process ends before call 0, 1, 2, ... */
static void the_process_dies(void **state)
{
    (void)state;
    for (int has_links = 0; has_links < 2; has_links++)
        for (unsigned existing = 0; existing < 1u << FILES; existing++)
            for (int n = 0, ended = 0; !ended; n++) {
                io_error error;
                int status, new_files = 0;
                make_old_files(existing);
                const pid_t child = fork();
                if (child == 0) {
                    disk_begin(has_links);
                    disk.exit_before = n;
                    _exit(publish_three(&error) ? 1 : 2);
                }
                assert_int_equal(waitpid(child, &status, 0), child);
                ended = WEXITSTATUS(status);
                assert_in_range(ended, 0, 1);
                for (int i = 0; i < FILES; i++) {
                    const content now = content_of(NAMES[i]);
                    assert_true(now == WHOLE_NEW || now == (existing >> i & 1 ? WHOLE_OLD : NOTHING));
                    assert_true(now != WHOLE_NEW || new_files == i); /* files are replaced in order */
                    new_files += now == WHOLE_NEW;
                }
                assert_true(!ended || new_files == FILES);
                assert_true(publish_three(&error));
                assert_all_new(existing);
            }
}

/* ---- fsync ------------------------------------------------------------------------------------------------- */

static void files_are_synced_before_and_folders_after(void **state)
{
    (void)state;
    io_error error;
    make_old_files(2);
    disk_begin(true);
    assert_true(publish_three(&error));
    disk_end();
    assert_string_equal(disk.trace, "fsync a.partial\n"
                                    "fsync b.partial\n"
                                    "fsync c.partial\n"
                                    "unlink a.partial.old\n"
                                    "link a a.partial.old\n"
                                    "rename a.partial a\n"
                                    "unlink b.partial.old\n"
                                    "link b b.partial.old\n"
                                    "rename b.partial b\n"
                                    "unlink c.partial.old\n"
                                    "link c c.partial.old\n"
                                    "rename c.partial c\n"
                                    "fsync FOLDER\n"
                                    "fsync FOLDER\n"
                                    "fsync FOLDER\n"
                                    "unlink b.partial.old\n");
}

/* The folders are also synced after a rollback. */
static void folders_are_synced_after_a_failure(void **state)
{
    (void)state;
    io_error error;
    make_old_files(1);
    disk_begin(true);
    disk.failing = RENAME;
    disk.first = disk.last = 1;
    assert_false(publish_three(&error));
    disk_end();
    assert_non_null(strstr(error.text, "/b: cannot be put in place: Input/output error"));
    const char *restored = strstr(disk.trace, "rename a.partial.old a\n");
    assert_non_null(restored);
    assert_non_null(strstr(restored, "fsync FOLDER\n"));
}

static void a_single_file(void **state)
{
    (void)state;
    const cot_tensor t = cot_tensor_contiguous((void *)NEW, COT_F32, 1, SHAPE(2));
    io_error error;
    disk_begin(true);
    assert_true(npy_write(in_folder("a"), &t, &error));
    disk_end();
    assert_string_equal(disk.trace, "fsync a.partial\nunlink a.partial.old\nlink a a.partial.old\nrename a.partial a\n"
                                    "fsync FOLDER\n");
}

/* ---- permissions, links, locks ------------------------------------------------------------------------------ */

static mode_t mode_of(const char *name)
{
    struct stat information;
    assert_int_equal(lstat(in_folder(name), &information), 0);
    return information.st_mode;
}

static void permissions_are_kept(void **state)
{
    (void)state;
    static const mode_t modes[] = {0600, 0640, 0666, 0777, 0444, 0400};
    const cot_tensor t = cot_tensor_contiguous((void *)NEW, COT_F32, 1, SHAPE(2));
    io_error error;
    const mode_t before = umask(027);
    for (size_t i = 0; i < COUNT(modes); i++) {
        write_bytes(in_folder("a.npy"), OLD, sizeof OLD - 1);
        assert_int_equal(chmod(in_folder("a.npy"), modes[i]), 0);
        assert_true(npy_write(in_folder("a.npy"), &t, &error));
        assert_int_equal(mode_of("a.npy"), S_IFREG | modes[i]);
        assert_int_equal(__real_unlink(in_folder("a.npy")), 0);
    }
    assert_true(npy_write(in_folder("b.npy"), &t, &error)); /* a new file has the permissions of the umask */
    assert_int_equal(mode_of("b.npy"), S_IFREG | 0640);
    umask(before);
}

/* A private file is private while it is written. The partial file of a killed process does not disturb. */
static void partial_files_are_private_too(void **state)
{
    (void)state;
    io_writer writer;
    io_error error;
    write_bytes(in_folder("a"), OLD, sizeof OLD - 1);
    assert_int_equal(chmod(in_folder("a"), 0400), 0);
    write_bytes(in_folder("a.partial"), "left behind", 11);
    assert_int_equal(chmod(in_folder("a.partial"), 0444), 0);
    assert_true(io_open(&writer, in_folder("a"), &error));
    assert_int_equal(mode_of("a.partial"), S_IFREG | 0600);
    io_abandon(&writer);
    assert_int_equal(content_of("a"), WHOLE_OLD);
}

static void symbolic_links_are_written_through(void **state)
{
    (void)state;
    const cot_tensor t = cot_tensor_contiguous((void *)NEW, COT_F32, 1, SHAPE(2));
    io_error error;
    char target[64], names[256];
    write_bytes(in_folder("a"), OLD, sizeof OLD - 1);
    assert_int_equal(chmod(in_folder("a"), 0604), 0);
    assert_int_equal(symlink("a", in_folder("link")), 0);
    assert_true(npy_write(in_folder("link"), &t, &error));
    assert_int_equal(mode_of("link") & S_IFMT, S_IFLNK);
    assert_int_equal(readlink(in_folder("link"), target, sizeof target), 1);
    assert_int_equal(content_of("a"), WHOLE_NEW);
    assert_int_equal(mode_of("a"), S_IFREG | 0604);
    assert_int_equal(list_folder(names, sizeof names), 2);
    assert_int_equal(symlink("missing", in_folder("dangling")), 0);
    assert_false(npy_write(in_folder("dangling"), &t, &error));
    assert_non_null(strstr(error.text, "/dangling: is a symbolic link to a file that is not there"));
    assert_false(io_can_write(in_folder("dangling"), &error));
    assert_int_equal(list_folder(names, sizeof names), 3);
}

/* Two names of one file: the second writer detects the first. */
static void a_link_and_its_file_at_once(void **state)
{
    (void)state;
    io_writer first, second;
    io_error error;
    write_bytes(in_folder("a"), OLD, sizeof OLD - 1);
    assert_int_equal(symlink("a", in_folder("link")), 0);
    assert_true(io_open(&first, in_folder("a"), &error));
    assert_false(io_open(&second, in_folder("link"), &error));
    assert_non_null(strstr(error.text, "/a: another process is writing it"));
    io_abandon(&first);
}

static void a_file_system_without_locks(void **state)
{
    (void)state;
    io_error error;
    make_old_files(5);
    write_bytes(in_folder("a.partial"), "left behind", 11);
    disk_begin(true);
    disk.has_locks = false;
    const bool good = publish_three(&error);
    disk_end();
    assert_true(good);
    assert_all_new(5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_FOLDER(one_call_fails),
        IN_FOLDER(renames_stop_working),
        IN_FOLDER(the_process_dies),
        IN_FOLDER(files_are_synced_before_and_folders_after),
        IN_FOLDER(folders_are_synced_after_a_failure),
        IN_FOLDER(a_single_file),
        IN_FOLDER(permissions_are_kept),
        IN_FOLDER(partial_files_are_private_too),
        IN_FOLDER(symbolic_links_are_written_through),
        IN_FOLDER(a_link_and_its_file_at_once),
        IN_FOLDER(a_file_system_without_locks),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
