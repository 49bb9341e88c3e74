/* A lender that answers every frame with the same bytes: what sockets alone cost.  See bare.py. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 512, CHUNK = 4096 };

static int answer(int fd, const char *reply, size_t nbytes)
{
    unsigned char got[CHUNK];
    ssize_t have = recv(fd, got, sizeof got, 0);
    if (have < 0)
        return errno == EAGAIN ? 0 : -1;
    if (have == 0) {
        close(fd); /* which leaves the epoll set too */
        return 0;
    }
    for (ssize_t at = 0; at < have;) {
        uint32_t length;
        if (have - at < 4)
            return -1;
        memcpy(&length, got + at, 4);
        at += 4 + (ssize_t)ntohl(length);
        if (at > have || send(fd, reply, nbytes, MSG_NOSIGNAL) != (ssize_t)nbytes)
            return -1;
    }
    return 0;
}

/* Serve until `stop` is readable; 0 then, -1 on anything that a benchmark does not expect. */
int serve(int listener, int stop, const char *reply, size_t nbytes, long pause_ns)
{
    struct epoll_event event = {.events = EPOLLIN}, ready[EVENTS];
    const struct timespec pause = {.tv_nsec = pause_ns};
    const int on = 1;
    int epoll = epoll_create1(EPOLL_CLOEXEC), result = 0, stopped = 0;
    event.data.fd = listener;
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    event.data.fd = stop;
    epoll_ctl(epoll, EPOLL_CTL_ADD, stop, &event);
    while (!stopped && result == 0) {
        int count = epoll_wait(epoll, ready, EVENTS, -1);
        for (int n = 0; n < count && result == 0; n++) {
            int fd = ready[n].data.fd;
            if (fd == stop) {
                stopped = 1;
            } else if (fd == listener) {
                int accepted = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
                setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                event.data.fd = accepted;
                epoll_ctl(epoll, EPOLL_CTL_ADD, accepted, &event);
            } else {
                result = answer(fd, reply, nbytes);
            }
        }
        nanosleep(&pause, NULL);
    }
    close(epoll);
    return result;
}
