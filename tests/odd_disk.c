// A disk without an ability, for LD_PRELOAD: below the folder ODD_PLACE, calls fail with the errno in ODD_FLOCK,
// ODD_FSYNC_FOLDER, ODD_FSYNC_FILE, ODD_CHMOD or ODD_OPEN_FOLDER, each a number.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int asked(const char *name) {
    const char *number = getenv(name);
    return number ? atoi(number) : 0;
}

static int is_below(const char *path) {
    const char *place = getenv("ODD_PLACE");
    char folder[4096];
    if (path && path[0] != '/') path = getcwd(folder, sizeof folder);  // of a relative path
    return place && path && strncmp(path, place, strlen(place)) == 0;
}

static int is_odd(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int fails(const char *name) {
    int code = asked(name);
    if (code) errno = code;
    return code;
}

int flock(int file, int operation) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    return is_odd(file) && fails("ODD_FLOCK") ? -1 : real(file, operation);
}

int fsync(int file) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    struct stat about;
    if (is_odd(file) && fstat(file, &about) == 0) {
        if (fails(S_ISDIR(about.st_mode) ? "ODD_FSYNC_FOLDER" : "ODD_FSYNC_FILE")) return -1;
    }
    return real(file);
}

int chmod(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = dlsym(RTLD_NEXT, "chmod");
    return is_below(path) && fails("ODD_CHMOD") ? -1 : real(path, mode);
}

static int open_folder(const char *path, int flags) {
    struct stat about;
    return is_below(path) && !(flags & (O_CREAT | O_WRONLY | O_RDWR)) && stat(path, &about) == 0 &&
           S_ISDIR(about.st_mode) && fails("ODD_OPEN_FOLDER");
}

int open(const char *path, int flags, ...) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    return open_folder(path, flags) ? -1 : real(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    return open_folder(path, flags) ? -1 : real(path, flags, mode);
}
