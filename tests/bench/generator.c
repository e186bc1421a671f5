/* Sends prepared HTTP requests over many connections, and reads processor clocks and latencies.

   One thread, one epoll set, no library but the C library's: an answer costs it little more than its system calls,
   so it can load a compiled server from one core. tests/bench/generator.py compiles and starts it, and describes
   its input and output. Without a schedule each connection asks again when it is answered (closed loop). With
   one, requests are due at fixed moments whatever the server does (open loop): a request that finds no free
   connection waits, and its latency begins when it was due. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    STATUSES = 600,
    BUCKETS = 2560,     /* of a histogram: 64 for each power of two */
    PROGRAMS = 64,      /* whose processor clocks are read */
    ODD = 400,          /* bytes of an unexpected answer that are shown */
    FIRST_BUFFER = 16384,
    TEMPLATES = 8,
};
static const uint64_t SECOND = 1000000000ull, GRACE = 10 * SECOND;

/* The content of a slot: the sequence's next number, that number again, a fresh number, or random digits. */
enum { NEXT, SAME, FRESH, HEX, DIGITS };
typedef struct { uint32_t offset, digits, kind; } Slot;
typedef struct { uint32_t size, slot_count; const Slot *slots; const char *bytes; } Template;

typedef struct {
    int socket, busy, counted;  /* busy: 1 waits for an answer, -1 is lost; counted: its request is in the window */
    uint64_t began;
    char *requests[TEMPLATES], *request, *in;  /* a request from each template; the newest that was sent */
    size_t size, written, in_room, got;
} Connection;

/* Requests are made from the first template; one in odd_in, at random, from one of the others. */
static Template templates[TEMPLATES];
static const uint32_t *sequence;
static const uint64_t *schedule;
static uint32_t template_count, odd_in, sequence_size, schedule_size, next_in_sequence, next_due;
static uint64_t fresh, start, window_from, window_to, last_answer;
static const char *expected = "", *local = "";
static size_t expected_size, local_size;

static uint64_t answers, expected_found, local_found, lost, statuses[STATUSES];
static uint64_t waits[BUCKETS], lateness[BUCKETS];
static char odd[ODD + 1];
static int events, is_measuring;

static void fail(const char *what) { perror(what); exit(1); }

static uint64_t clock_of(clockid_t clock) {
    struct timespec at;
    if (clock_gettime(clock, &at)) return 0;
    return (uint64_t)at.tv_sec * SECOND + (uint64_t)at.tv_nsec;
}
static uint64_t now(void) { return clock_of(CLOCK_MONOTONIC); }
/* The processor time of a whole process, as the kernel counts it (clock_getcpuclockid makes the same number). */
static uint64_t processor_of(pid_t pid) { return clock_of((clockid_t)(~(unsigned)pid << 3 | 2)); }

/* The time that all cores were busy, in nanoseconds; time stolen by the hypervisor counts as busy. */
static uint64_t machine(void) {
    unsigned long long user, nice, system, idle, iowait, irq, softirq, steal;
    FILE *file = fopen("/proc/stat", "r");
    if (!file) return 0;
    int read = fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &user, &nice, &system, &idle, &iowait, &irq,
                      &softirq, &steal);
    fclose(file);
    if (read != 8) return 0;
    return (user + nice + system + irq + softirq + steal) * (SECOND / (uint64_t)sysconf(_SC_CLK_TCK));
}

static void note(uint64_t *histogram, uint64_t ns) {
    uint64_t at = ns;
    if (ns >= 64) {
        int power = 63 - __builtin_clzll(ns);
        at = (uint64_t)(power - 5) * 64 + ((ns >> (power - 6)) & 63);
    }
    histogram[at < BUCKETS ? at : BUCKETS - 1]++;
}
static uint64_t upper(uint64_t at) { return at < 64 ? at : ((65 + at % 64) << (at / 64 - 1)) - 1; }

static void write_request(Connection *one) {
    while (one->written < one->size) {
        ssize_t wrote = send(one->socket, one->request + one->written, one->size - one->written, MSG_NOSIGNAL);
        if (wrote < 0) {
            if (errno != EAGAIN) { lost++; one->busy = -1; return; }
            struct epoll_event wanted = {.events = EPOLLIN | EPOLLOUT, .data.ptr = one};
            epoll_ctl(events, EPOLL_CTL_MOD, one->socket, &wanted);
            return;
        }
        one->written += (size_t)wrote;
    }
}

/* SplitMix64. Its seed differs in each run, so that no run repeats the requests of the one before. */
static uint64_t random_state;
static uint64_t random_bits(void) {
    uint64_t mixed = random_state += 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
    return mixed ^ mixed >> 31;
}

static void put_hex(char *to, uint32_t digits) {
    uint64_t bits = 0;
    for (uint32_t digit = 0; digit < digits; digit++, bits >>= 4) {
        if (digit % 16 == 0) bits = random_bits();
        to[digit] = "0123456789abcdef"[bits & 15];
    }
}

static void put_number(char *to, uint32_t digits, uint64_t rest) {
    for (char *end = to + digits; end > to; rest /= 10) *--end = (char)('0' + rest % 10);
}

static void ask(Connection *one, uint64_t began) {
    uint32_t which = odd_in && random_bits() % odd_in == 0 ? 1 + (uint32_t)(random_bits() % (template_count - 1)) : 0;
    const Template *its = &templates[which];
    uint64_t number = 0;
    one->request = one->requests[which];
    one->size = its->size;
    for (const Slot *slot = its->slots; slot < its->slots + its->slot_count; slot++) {
        char *to = one->request + slot->offset;
        if (slot->kind == NEXT) {
            number = sequence[next_in_sequence];
            if (++next_in_sequence == sequence_size) next_in_sequence = 0;
        }
        if (slot->kind == HEX) put_hex(to, slot->digits);
        else if (slot->kind == DIGITS) put_number(to, slot->digits, random_bits());
        else put_number(to, slot->digits, slot->kind == FRESH ? fresh++ : number);
    }
    one->written = 0;
    one->busy = 1;
    one->began = began;
    one->counted = began >= window_from;
    write_request(one);
}

static uint64_t times_in(const char *body, size_t size, const char *wanted, size_t wanted_size) {
    uint64_t times = 0;
    const char *end = body + size;
    while (wanted_size && (body = memmem(body, (size_t)(end - body), wanted, wanted_size))) {
        times++;
        body += wanted_size;
    }
    return times;
}

/* The size of the answer at the beginning of a buffer, or 0 if it is not complete; -1 if it has no length. */
static ssize_t answer_size(const char *in, size_t got, size_t *head) {
    const char *end = memmem(in, got, "\r\n\r\n", 4);
    if (!end) return 0;
    *head = (size_t)(end - in) + 4;
    for (const char *line = in; line < end;) {
        line = (const char *)memchr(line, '\n', *head - (size_t)(line - in)) + 1;
        if (!strncasecmp(line, "content-length:", 15)) {
            size_t size = *head + strtoul(line + 15, NULL, 10);
            return size <= got ? (ssize_t)size : 0;
        }
    }
    return -1;
}

static void count(Connection *one, size_t head, size_t size, uint64_t at) {
    int status = atoi(one->in + 9);
    uint64_t found = times_in(one->in + head, size - head, expected, expected_size);
    if (!schedule_size) one->counted = is_measuring;
    if (!one->counted) return;
    answers++;
    statuses[status > 0 && status < STATUSES ? status : 0]++;
    expected_found += found;
    local_found += times_in(one->in + head, size - head, local, local_size);
    note(waits, at - one->began);
    if (expected_size && !found && !odd[0]) memcpy(odd, one->in, size < ODD ? size : ODD);
}

/* Read what arrived; return 1 when the answer is complete. */
static int receive(Connection *one) {
    for (;;) {
        if (one->got == one->in_room) one->in = realloc(one->in, one->in_room *= 2);
        ssize_t read = recv(one->socket, one->in + one->got, one->in_room - one->got, 0);
        if (read < 0 && errno == EAGAIN) return 0;
        if (read <= 0) { lost++; one->busy = -1; return 0; }
        one->got += (size_t)read;
        size_t head = 0;
        ssize_t size = answer_size(one->in, one->got, &head);
        if (size < 0) { fprintf(stderr, "an answer without a length: %.*s\n", (int)head, one->in); exit(1); }
        if (!size) continue;
        uint64_t at = last_answer = now();
        count(one, head, (size_t)size, at);
        one->got = 0;
        one->busy = 0;
        return 1;
    }
}

static void load(const char *path) {
    int file = open(path, O_RDONLY);
    struct stat about;
    if (file < 0 || fstat(file, &about)) fail(path);
    const char *at = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0);
    if (at == MAP_FAILED) fail("mmap");
    const uint32_t *header = (const uint32_t *)at;
    template_count = header[0], odd_in = header[1], sequence_size = header[2], schedule_size = header[3];
    if (template_count > TEMPLATES) { fprintf(stderr, "at most %d templates\n", TEMPLATES); exit(2); }
    schedule = (const uint64_t *)(header + 4);
    sequence = (const uint32_t *)(schedule + schedule_size);
    const uint32_t *sizes = sequence + sequence_size;
    const Slot *slots = (const Slot *)(sizes + 2 * template_count);
    for (uint32_t each = 0; each < template_count; each++) {
        templates[each] = (Template){.size = sizes[2 * each], .slot_count = sizes[2 * each + 1], .slots = slots};
        slots += templates[each].slot_count;
    }
    const char *bytes = (const char *)slots;
    for (uint32_t each = 0; each < template_count; bytes += templates[each++].size) templates[each].bytes = bytes;
}

static void connect_to(Connection *one, const char *host, int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int yes = 1;
    if (inet_pton(AF_INET, host, &to.sin_addr) != 1) fail(host);
    one->socket = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(one->socket, (struct sockaddr *)&to, sizeof to)) fail("connect");
    setsockopt(one->socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    fcntl(one->socket, F_SETFL, O_NONBLOCK);
    one->in = malloc(one->in_room = FIRST_BUFFER);
    for (uint32_t each = 0; each < template_count; each++)
        one->requests[each] = memcpy(malloc(templates[each].size), templates[each].bytes, templates[each].size);
    struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = one};
    epoll_ctl(events, EPOLL_CTL_ADD, one->socket, &wanted);
}

static void print_histogram(const char *name, const uint64_t *histogram) {
    const char *between = "";
    printf(",\"%s\":[", name);
    for (uint64_t at = 0; at < BUCKETS; at++)
        if (histogram[at]) {
            printf("%s[%llu,%llu]", between, (unsigned long long)upper(at), (unsigned long long)histogram[at]);
            between = ",";
        }
    printf("]");
}

/* INPUT HOST PORT CONNECTIONS WARM_NS WINDOW_NS FRESH EXPECTED LOCAL PID... */
int main(int count_of, char **words) {
    if (count_of < 10) { fprintf(stderr, "tests/bench/generator.py starts this program\n"); return 2; }
    load(words[1]);
    int connections = atoi(words[4]);
    uint64_t warm = strtoull(words[5], NULL, 10), window = strtoull(words[6], NULL, 10);
    fresh = strtoull(words[7], NULL, 10);
    expected = words[8], expected_size = strlen(expected);
    local = words[9], local_size = strlen(local);
    int programs = count_of - 10 < PROGRAMS ? count_of - 10 : PROGRAMS;
    uint64_t spent[PROGRAMS] = {0}, own = 0, busy = 0, began = 0, ended = 0;

    events = epoll_create1(0);
    Connection *all = calloc((size_t)connections, sizeof *all);
    for (int each = 0; each < connections; each++) connect_to(&all[each], words[2], atoi(words[3]));
    Connection **idle = calloc((size_t)connections, sizeof *idle);
    int idle_count = 0;
    uint64_t freed = 0; /* when a connection became free while there was none */
    /* A timer of its own, because the kernel lets a waiting program oversleep by 50 us. */
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event wanted = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    epoll_ctl(events, EPOLL_CTL_ADD, timer, &wanted);

    start = now();
    random_state = start ^ (uint64_t)getpid() << 48;
    window_from = start + warm, window_to = window_from + window;
    for (int each = 0; each < connections; each++)
        if (schedule_size) idle[idle_count++] = &all[each];
        else ask(&all[each], now());

    uint64_t armed = 0, give_up = 0;
    for (;;) {
        uint64_t at = now();
        if (!began && at >= window_from) {
            began = at;
            is_measuring = 1;
            own = processor_of(getpid());
            busy = machine();
            for (int each = 0; each < programs; each++) spent[each] = processor_of(atoi(words[10 + each]));
        }
        /* A closed loop goes on until there are enough answers, even on a machine with hardly any processor. */
        int has_enough = schedule_size || answers >= (uint64_t)connections || at >= window_to + GRACE || lost;
        if (!ended && at >= window_to && has_enough) {
            ended = at;
            is_measuring = 0;
            own = processor_of(getpid()) - own;
            busy = machine() - busy;
            for (int each = 0; each < programs; each++)
                spent[each] = processor_of(atoi(words[10 + each])) - spent[each];
        }
        if (ended) give_up = (last_answer > ended ? last_answer : ended) + GRACE;
        uint64_t wake = ended ? give_up : !began ? window_from : at < window_to ? window_to : window_to + GRACE;
        while (schedule_size && idle_count && next_due < schedule_size && start + schedule[next_due] <= at) {
            uint64_t due = start + schedule[next_due++];
            if (due >= window_from) note(lateness, at - (due > freed ? due : freed));
            ask(idle[--idle_count], due);
        }
        if (schedule_size && idle_count && next_due < schedule_size && start + schedule[next_due] < wake)
            wake = start + schedule[next_due];
        int waiting = 0;
        if (ended) {
            for (int each = 0; each < connections; each++) waiting += all[each].busy == 1;
            if ((!waiting && next_due >= schedule_size) || at >= give_up || lost) break;
        }
        if (wake != armed) {
            struct itimerspec moment = {.it_value = {(time_t)(wake / SECOND), (long)(wake % SECOND)}};
            timerfd_settime(timer, TFD_TIMER_ABSTIME, &moment, NULL);
            armed = wake;
        }
        struct epoll_event ready[256];
        int happened = epoll_wait(events, ready, 256, -1);
        if (happened < 0 && errno != EINTR) fail("epoll_wait");
        for (int each = 0; each < happened; each++) {
            Connection *one = ready[each].data.ptr;
            if (!one) { armed = 0; continue; }
            if (one->busy < 0) continue;
            if (ready[each].events & EPOLLOUT) {
                struct epoll_event reading = {.events = EPOLLIN, .data.ptr = one};
                epoll_ctl(events, EPOLL_CTL_MOD, one->socket, &reading);
                write_request(one);
            }
            if (one->busy >= 0 && ready[each].events & (EPOLLIN | EPOLLHUP | EPOLLERR) && receive(one)) {
                if (schedule_size && !idle_count) freed = last_answer;
                if (schedule_size) idle[idle_count++] = one;
                else if (!ended) ask(one, now());
            }
            if (one->busy < 0) epoll_ctl(events, EPOLL_CTL_DEL, one->socket, NULL);
        }
        if (lost == (uint64_t)connections) break;
    }
    /* A due request without an answer counts with the time that it has waited. */
    uint64_t unanswered = 0, at = now();
    for (int each = 0; each < connections && schedule_size; each++)
        if (all[each].busy && all[each].counted) { unanswered++; note(waits, at - all[each].began); }
    for (; next_due < schedule_size; next_due++)
        if (start + schedule[next_due] >= window_from) { unanswered++; note(waits, at - start - schedule[next_due]); }

    printf("{\"wall_ns\":%llu,\"answers\":%llu,\"expected\":%llu,\"local\":%llu,\"lost\":%llu,\"unanswered\":%llu",
           (unsigned long long)(ended - began), (unsigned long long)answers, (unsigned long long)expected_found,
           (unsigned long long)local_found, (unsigned long long)lost, (unsigned long long)unanswered);
    printf(",\"fresh\":%llu,\"own_ns\":%llu,\"machine_ns\":%llu,\"processor_ns\":[",
           (unsigned long long)fresh, (unsigned long long)own, (unsigned long long)busy);
    for (int each = 0; each < programs; each++) printf("%s%llu", each ? "," : "", (unsigned long long)spent[each]);
    printf("],\"statuses\":{");
    const char *between = "";
    for (int status = 0; status < STATUSES; status++)
        if (statuses[status]) {
            printf("%s\"%d\":%llu", between, status, (unsigned long long)statuses[status]);
            between = ",";
        }
    printf("}");
    print_histogram("waits", waits);
    print_histogram("lateness", lateness);
    printf(",\"odd\":\"");
    for (const char *each = odd; *each; each++)
        if (*each == '"' || *each == '\\') printf("\\%c", *each);
        else putchar(*each >= ' ' && *each <= '~' ? *each : ' ');
    printf("\"}\n");
    return 0;
}
