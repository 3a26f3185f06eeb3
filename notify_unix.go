//go:build unix

package main

import (
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// monotonicMicroseconds is the clock by which systemd (Type=notify-reload) tells the
// answer to its own signal from that to an earlier one. Go's clock has another origin.
func monotonicMicroseconds() string {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return "0"
	}
	return strconv.FormatInt(now.Nano()/int64(time.Microsecond), 10)
}
