cdef extern from *:
    """
    #if defined(__linux__)
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <signal.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>

    #define LOGQUARRY_BLOCK 4096
    #define LOGQUARRY_GROUP 1024
    #define LOGQUARRY_GROUPS 4096

    /* A watched map. The handler reads a slot while other threads change others: a start of 0 is a
       free slot, and it is stored last. */
    typedef struct {
        uintptr_t start;
        size_t size;
        pid_t owner;            /* 0: children have the map too */
        unsigned char *blocks;  /* one byte per block, 1 if it is lost */
        int next;
    } logquarry_slot;

    static logquarry_slot *logquarry_slots[LOGQUARRY_GROUPS];
    static int logquarry_used = 0, logquarry_free = -1, logquarry_ready = 0;
    static long long logquarry_lost = 0;
    static size_t logquarry_page = 0;
    /* The actions that were found before the first installation, and before the last one. */
    static struct sigaction logquarry_actions[3];
    static struct sigaction *logquarry_before = logquarry_actions;

    static logquarry_slot *logquarry_at(int number) {
        return logquarry_slots[number / LOGQUARRY_GROUP] + number % LOGQUARRY_GROUP;
    }

    /* Replaces a page by a page of FILL. Only system calls: this runs in a signal handler. */
    static int logquarry_replace(uintptr_t page) {
        int rights = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
        void *made = mmap(NULL, logquarry_page, rights, flags, -1, 0);
        if (made == MAP_FAILED) return 0;
        memset(made, 0xff, logquarry_page);
        /* One call: another thread sees the old page or all of the new one. */
        return mremap(made, logquarry_page, logquarry_page, MREMAP_MAYMOVE | MREMAP_FIXED,
                      (void *)page) != MAP_FAILED;
    }

    static void logquarry_on_bus(int number, siginfo_t *info, void *context);

    static int logquarry_is_ours(const struct sigaction *action) {
        return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == logquarry_on_bus;
    }

    /* Calls the handler that was there before. */
    static void logquarry_pass_on(int number, siginfo_t *info, void *context) {
        struct sigaction *before = __atomic_load_n(&logquarry_before, __ATOMIC_ACQUIRE), now;
        sigset_t pending;
        if (before->sa_flags & SA_SIGINFO) {
            before->sa_sigaction(number, info, context);
        } else if (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN) {
            /* The access repeats under the previous action. A sent signal has none: raise it. */
            sigaction(SIGBUS, before, NULL);
            if (info->si_code <= 0) raise(SIGBUS);
            return;
        } else {
            before->sa_handler(number);
        }
        /* faulthandler restores the action that it found, and raises the signal again. If it was
           enabled after the first map, it found this handler: the two would alternate for ever. */
        if (!sigpending(&pending) && sigismember(&pending, SIGBUS) == 1
            && !sigaction(SIGBUS, NULL, &now) && logquarry_is_ours(&now))
            sigaction(SIGBUS, logquarry_actions, NULL);
    }

    static void logquarry_on_bus(int number, siginfo_t *info, void *context) {
        int saved = errno, used = __atomic_load_n(&logquarry_used, __ATOMIC_ACQUIRE), i, done = 0;
        uintptr_t address = (uintptr_t)info->si_addr;
        uintptr_t page = address & ~((uintptr_t)logquarry_page - 1);
        /* Neither a signal that a process sent nor a misaligned access is a lost page. */
        if (info->si_code > 0 && info->si_code != BUS_ADRALN && info->si_code != SI_KERNEL)
            for (i = 0; i < used; i++) {
                logquarry_slot *slot = logquarry_at(i);
                uintptr_t start = __atomic_load_n(&slot->start, __ATOMIC_ACQUIRE);
                if (!start || address - start >= slot->size) continue;
                if (slot->owner && slot->owner != getpid()) continue;
                if (!done && !(done = logquarry_replace(page))) break;
                memset(slot->blocks + (page - start) / LOGQUARRY_BLOCK, 1,
                       logquarry_page / LOGQUARRY_BLOCK);
                __atomic_add_fetch(&logquarry_lost, 1, __ATOMIC_RELEASE);
            }
        errno = saved;
        if (done) return;
        logquarry_pass_on(number, info, context);
    }

    /* Installs the handler; also if another one has taken its place. 0 if it is not installed. */
    static int logquarry_install(void) {
        struct sigaction action, now, *before = logquarry_actions;
        if (sigaction(SIGBUS, NULL, &now)) return logquarry_ready;
        if (logquarry_is_ours(&now)) return 1;
        if (logquarry_ready)
            before = logquarry_actions + (logquarry_before == logquarry_actions + 1 ? 2 : 1);
        logquarry_page = (size_t)sysconf(_SC_PAGESIZE);
        memset(&action, 0, sizeof action);
        action.sa_sigaction = logquarry_on_bus;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
        sigemptyset(&action.sa_mask);
        /* The handler may run as soon as it is installed. */
        *before = now;
        __atomic_store_n(&logquarry_before, before, __ATOMIC_RELEASE);
        if (!sigaction(SIGBUS, &action, NULL)) logquarry_ready = 1;
        return logquarry_ready;
    }

    /* The number of the map's slot, -1 if it is not watched. The caller holds the GIL. */
    static int logquarry_watch(void *start, size_t size, int in_children) {
        int number = logquarry_free;
        logquarry_slot *slot;
        size_t pages;
        if (!size || !logquarry_install()) return -1;
        if (number < 0) {
            number = logquarry_used;
            if (number / LOGQUARRY_GROUP >= LOGQUARRY_GROUPS) return -1;
            if (number % LOGQUARRY_GROUP == 0) {
                void *group = calloc(LOGQUARRY_GROUP, sizeof(logquarry_slot));
                if (group == NULL) return -1;
                logquarry_slots[number / LOGQUARRY_GROUP] = (logquarry_slot *)group;
            }
        }
        slot = logquarry_at(number);
        pages = (size + logquarry_page - 1) / logquarry_page;
        slot->blocks = (unsigned char *)calloc(pages, logquarry_page / LOGQUARRY_BLOCK);
        if (slot->blocks == NULL) return -1;
        if (number == logquarry_used)
            __atomic_store_n(&logquarry_used, number + 1, __ATOMIC_RELEASE);
        else
            logquarry_free = slot->next;
        slot->size = pages * logquarry_page;
        slot->owner = in_children ? 0 : getpid();
        __atomic_store_n(&slot->start, (uintptr_t)start, __ATOMIC_RELEASE);
        return number;
    }

    static void logquarry_forget(int number) {
        logquarry_slot *slot = logquarry_at(number);
        __atomic_store_n(&slot->start, (uintptr_t)0, __ATOMIC_SEQ_CST);
        free(slot->blocks);
        slot->next = logquarry_free;
        logquarry_free = number;
    }

    static long long logquarry_total(void) {
        return __atomic_load_n(&logquarry_lost, __ATOMIC_ACQUIRE);
    }

    static void logquarry_note(void) {
        __atomic_add_fetch(&logquarry_lost, 1, __ATOMIC_RELEASE);
    }

    /* The first lost block at or after a block, -1 if there is none. */
    static long long logquarry_next(int number, long long block) {
        logquarry_slot *slot = logquarry_at(number);
        long long count = (long long)(slot->size / LOGQUARRY_BLOCK);
        unsigned char *found;
        if (block >= count) return -1;
        found = (unsigned char *)memchr(slot->blocks + block, 1, (size_t)(count - block));
        return found == NULL ? -1 : (long long)(found - slot->blocks);
    }
    #else
    #define logquarry_watch(start, size, in_children) (-1)
    #define logquarry_forget(number)
    static long long logquarry_lost = 0;
    #define logquarry_total() logquarry_lost
    #define logquarry_note() (logquarry_lost++)
    #define logquarry_next(number, block) (-1)
    #endif
    """
    int c_watch "logquarry_watch"(void *start, size_t size, int in_children)
    void c_forget "logquarry_forget"(int number)
    long long c_total "logquarry_total"() nogil
    void c_note "logquarry_note"()
    long long c_next "logquarry_next"(int number, long long block) nogil

cpdef long long lost()
