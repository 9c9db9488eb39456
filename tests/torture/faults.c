/* Loaded before the C library (LD_PRELOAD): lets the n-th system call of a kind fail, or kills the process there.
 *
 * Nothing happens before torture_arm(what, folder, who). `what` is one line:
 *
 *     OPERATION NUMBER ACTION ERRNO PREFIX
 *
 * OPERATION  open write fsync syncfs rename unlink mkdir read send recv alloc; change: one of the first seven; any;
 *            `log` only writes calls down
 * NUMBER     which call of this process, from 1 on
 * ACTION     fail: return -1 with ERRNO; short: write or read half; before, after: kill this process there;
 *            stop: stop this process there, until another one lets it go on;
 *            forever: fail from this call on
 * PREFIX     calls count if their path begins so; of sockets and allocations all count; in FOLDER only FOLDER/data counts
 *
 * A fault comes once in a trial: the process that makes FOLDER/fired acts, except with `forever`. With `log`, each
 * call is a line in FOLDER/hits: who, the operation, and the path; of a rename first the old path, then a tab.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char operation[16], action[16], prefix[4096], folder[4096], who[64];
static long number, least_alloc = 1 << 20;
static int code, armed, logging = -1;
static long count;
static __thread char renamed[4096]; /* the old path, while a file is renamed */

void torture_arm(const char *what, const char *where, const char *name) {
    char rest[4096] = "";
    if (sscanf(what, "%15s %ld %15s %d %4095s", operation, &number, action, &code, rest) < 4) return;
    strncpy(prefix, rest, sizeof prefix - 1);
    strncpy(folder, where, sizeof folder - 1);
    strncpy(who, name, sizeof who - 1);
    if (!strcmp(operation, "log")) {
        char path[4200];
        snprintf(path, sizeof path, "%s/hits", folder);
        logging = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    }
    __atomic_store_n(&armed, 1, __ATOMIC_RELEASE);
}

static int first(void) {
    char path[4200];
    snprintf(path, sizeof path, "%s/fired", folder);
    long fd = syscall(SYS_openat, AT_FDCWD, path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (fd >= 0) syscall(SYS_close, fd);
    return fd >= 0 || !strcmp(action, "forever");
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); }

/* Whether an operation changes files: it is none of read, openread, send, recv, alloc. */
static int changes(const char *op) {
    return strcmp(op, "read") && strcmp(op, "openread") && strcmp(op, "send") && strcmp(op, "recv") && strcmp(op, "alloc");
}

/* Whether this call is the one; `path` may be NULL. The caller acts. */
static int strikes(const char *op, const char *path) {
    if (!__atomic_load_n(&armed, __ATOMIC_ACQUIRE)) return 0;
    if (path && prefix[0] && strncmp(path, prefix, strlen(prefix))) return 0;
    if (path && !strncmp(path, folder, strlen(folder)) && strncmp(path + strlen(folder), "/data/", 6)) return 0;
    if (logging >= 0) {
        char line[4400];
        int length = snprintf(line, sizeof line, "%scall.%s %s%s%s\n", who, op, renamed, *renamed ? "\t" : "", path ? path : "");
        syscall(SYS_write, logging, line, length);
        return 0;
    }
    if (strcmp(op, operation) && strcmp("any", operation) && (strcmp("change", operation) || !changes(op))) return 0;
    long now = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    int hit = now == number || (now > number && !strcmp(action, "forever"));
    if (!hit || !first()) return 0;
    if (!strcmp(action, "before")) die();
    if (!strcmp(action, "stop")) return (int)syscall(SYS_kill, getpid(), SIGSTOP);
    return 1;
}

static const char *path_of(int fd, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, size - 1);
    if (n <= 0) return NULL;
    buffer[n] = 0;
    return buffer;
}

static const char *absolute(int at, const char *path, char *buffer, size_t size) {
    if (!path || path[0] == '/') return path;
    char base[2048];
    const char *found = at == AT_FDCWD ? getcwd(base, sizeof base) : path_of(at, base, sizeof base);
    snprintf(buffer, size, "%s/%s", found ? found : "", path);
    return buffer;
}

#define REAL(name) ({ static typeof(&name) real; if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name); real; })
#define ACTS(kind) (!strcmp(action, kind))
/* Fail with errno, or call and die after it. */
#define STRUCK(op, path, failed, call)                                                                              \
    if (strikes(op, path)) {                                                                                          \
        if (ACTS("after")) { call; die(); }                                                                         \
        errno = code;                                                                                                 \
        return failed;                                                                                                \
    }

#define OPEN(name, at, first_parameters, first_arguments)                                                            \
    int name(first_parameters, int flags, ...) {                                                                      \
        mode_t mode = 0;                                                                                              \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } \
        char buffer[8192];                                                                                            \
        STRUCK(flags & (O_CREAT | O_WRONLY | O_RDWR) ? "open" : "openread", absolute(at, path, buffer, sizeof buffer), -1,         \
               REAL(name)(first_arguments, flags, mode))                                                              \
        return REAL(name)(first_arguments, flags, mode);                                                              \
    }
#define COMMA ,
OPEN(open, AT_FDCWD, const char *path, path)
OPEN(open64, AT_FDCWD, const char *path, path)
OPEN(openat, at, int at COMMA const char *path, at COMMA path)
OPEN(openat64, at, int at COMMA const char *path, at COMMA path)

/* Whether it leads to another process: an event loop wakes itself through a pair of Unix sockets, which never fails. */
static int is_socket(int fd) {
    struct stat found;
    struct sockaddr_storage name;
    socklen_t size = sizeof name;
    return !fstat(fd, &found) && S_ISSOCK(found.st_mode) &&
        !getsockname(fd, (struct sockaddr *)&name, &size) && name.ss_family != AF_UNIX;
}

/* Reading and writing: of files under the prefix, or of sockets. */
#define TRANSFER(type, name, file_op, socket_op, parameters, arguments, halved)                                       \
    type name parameters {                                                                                            \
        if (__atomic_load_n(&armed, __ATOMIC_ACQUIRE)) {                                                    \
            char buffer[4096];                                                                                        \
            int socket = is_socket(fd);                                                                               \
            const char *path = socket ? NULL : path_of(fd, buffer, sizeof buffer);                                     \
            if ((socket || (path && path[0] == '/')) && strikes(socket ? socket_op : file_op, path)) {                 \
                if (ACTS("after")) { REAL(name) arguments; die(); }                                                  \
                if (ACTS("short")) return REAL(name) halved;                                                          \
                errno = code;                                                                                         \
                return -1;                                                                                            \
            }                                                                                                         \
        }                                                                                                             \
        return REAL(name) arguments;                                                                                  \
    }
#define HALF (size > 1 ? size / 2 : size)
TRANSFER(ssize_t, write, "write", "send", (int fd, const void *data, size_t size), (fd, data, size), (fd, data, HALF))
TRANSFER(ssize_t, pwrite, "write", "send", (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), (fd, data, HALF, at))
TRANSFER(ssize_t, pwrite64, "write", "send", (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), (fd, data, HALF, at))
TRANSFER(ssize_t, writev, "write", "send", (int fd, const struct iovec *data, int size), (fd, data, size), (fd, data, HALF))
TRANSFER(ssize_t, read, "read", "recv", (int fd, void *data, size_t size), (fd, data, size), (fd, data, HALF))
TRANSFER(ssize_t, pread, "read", "recv", (int fd, void *data, size_t size, off_t at), (fd, data, size, at), (fd, data, HALF, at))
TRANSFER(ssize_t, pread64, "read", "recv", (int fd, void *data, size_t size, off64_t at), (fd, data, size, at), (fd, data, HALF, at))
TRANSFER(ssize_t, send, "write", "send", (int fd, const void *data, size_t size, int flags), (fd, data, size, flags), (fd, data, HALF, flags))
TRANSFER(ssize_t, recv, "read", "recv", (int fd, void *data, size_t size, int flags), (fd, data, size, flags), (fd, data, HALF, flags))
TRANSFER(ssize_t, sendmsg, "write", "send", (int fd, const struct msghdr *data, int size), (fd, data, size), (fd, data, size))
TRANSFER(int, ftruncate, "write", "send", (int fd, off_t size), (fd, size), (fd, size))
TRANSFER(int, ftruncate64, "write", "send", (int fd, off64_t size), (fd, size), (fd, size))
TRANSFER(int, fsync, "fsync", "send", (int fd), (fd), (fd))
TRANSFER(int, fdatasync, "fsync", "send", (int fd), (fd), (fd))
TRANSFER(int, syncfs, "syncfs", "send", (int fd), (fd), (fd))

#define RENAMES(name, a, b, parameters, arguments)                                                                     \
    int name parameters {                                                                                             \
        char buffer[8192], before[8192];                                                                              \
        strncpy(renamed, absolute(a, old, before, sizeof before), sizeof renamed - 1);                                \
        int hit = strikes("rename", absolute(b, new, buffer, sizeof buffer));                                         \
        renamed[0] = 0;                                                                                               \
        if (hit && ACTS("after")) { REAL(name) arguments; die(); }                                                    \
        if (hit) { errno = code; return -1; }                                                                         \
        return REAL(name) arguments;                                                                                  \
    }
#define PATHS(name, op, at, parameters, arguments, path)                                                              \
    int name parameters {                                                                                             \
        char buffer[8192];                                                                                            \
        STRUCK(op, absolute(at, path, buffer, sizeof buffer), -1, REAL(name) arguments)                               \
        return REAL(name) arguments;                                                                                  \
    }
RENAMES(rename, AT_FDCWD, AT_FDCWD, (const char *old, const char *new), (old, new))
RENAMES(renameat, a, b, (int a, const char *old, int b, const char *new), (a, old, b, new))
RENAMES(renameat2, a, b, (int a, const char *old, int b, const char *new, unsigned flags), (a, old, b, new, flags))
RENAMES(link, AT_FDCWD, AT_FDCWD, (const char *old, const char *new), (old, new))
PATHS(unlink, "unlink", AT_FDCWD, (const char *path), (path), path)
PATHS(unlinkat, "unlink", at, (int at, const char *path, int flags), (at, path, flags), path)
PATHS(rmdir, "unlink", AT_FDCWD, (const char *path), (path), path)
PATHS(mkdir, "mkdir", AT_FDCWD, (const char *path, mode_t mode), (path, mode), path)
PATHS(mkdirat, "mkdir", at, (int at, const char *path, mode_t mode), (at, path, mode), path)

/* Allocations of more than a MiB; dlsym itself allocates, so the C library's own names are called. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
#define NONE(size) ((long)(size) >= least_alloc && strikes("alloc", NULL) && !ACTS("short"))
void *malloc(size_t size) { if (NONE(size)) { errno = ENOMEM; return NULL; } return __libc_malloc(size); }
void *calloc(size_t n, size_t size) { if (NONE(n * size)) { errno = ENOMEM; return NULL; } return __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { if (NONE(size)) { errno = ENOMEM; return NULL; } return __libc_realloc(p, size); }
void *aligned_alloc(size_t a, size_t size) { if (NONE(size)) { errno = ENOMEM; return NULL; } return __libc_memalign(a, size); }
int posix_memalign(void **p, size_t a, size_t size) {
    if (NONE(size)) return ENOMEM;
    return (*p = __libc_memalign(a, size)) ? 0 : ENOMEM;
}
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t offset) {
    if (NONE(size)) { errno = ENOMEM; return (void *)-1; }
    return (void *)syscall(SYS_mmap, at, size, protection, flags, fd, offset);
}
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) { return mmap64(at, size, protection, flags, fd, offset); }
