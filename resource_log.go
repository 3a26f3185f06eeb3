package main

import (
	"log/slog"
	"sync"
	"time"

	"warmroute/backends/transport"
)

// resourceLogInterval is the least time between two logs of the same failure, of
// which there may be thousands a second.
const resourceLogInterval = time.Minute

// resourceLog logs, once a minute each, that this process is out of file
// descriptors, and that connections cannot be accepted. Safe for concurrent use.
type resourceLog struct {
	log *slog.Logger

	mu                  sync.Mutex
	descriptors, accept messageLimit
}

// messageLimit lets one message be logged in each resourceLogInterval.
type messageLimit struct {
	next       time.Time
	suppressed int
}

// allow reports whether the message is to be logged, and how many were suppressed
// since the last that was.
func (m *messageLimit) allow(now time.Time) (ok bool, suppressed int) {
	if now.Before(m.next) {
		m.suppressed++
		return false, 0
	}
	suppressed = m.suppressed
	*m = messageLimit{next: now.Add(resourceLogInterval)}
	return true, suppressed
}

// outOfDescriptors takes the error of a connection that could not be made or
// accepted for want of a file descriptor.
func (l *resourceLog) outOfDescriptors(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ok, suppressed := l.descriptors.allow(time.Now()); ok {
		l.log.Error("out of file descriptors", "limit", fileDescriptorLimit(), "err", err, "suppressed", suppressed,
			"fix", "raise the limit (ulimit -n, systemd's LimitNOFILE=, Docker's --ulimit nofile=), or lower limits.connections and limits.in_flight")
	}
}

// acceptFailed takes the error of a connection that could not be accepted.
func (l *resourceLog) acceptFailed(err error) {
	if transport.IsOutOfDescriptors(err) {
		l.outOfDescriptors(err)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if ok, suppressed := l.accept.allow(time.Now()); ok {
		l.log.Error("accept failed", "err", err, "suppressed", suppressed)
	}
}
