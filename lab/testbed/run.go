package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"warmroute/clock"
)

// Main runs a program and exits: with 1 if ok is false, with 2 on an error. An interrupt
// ends ctx, so that the program can stop its processes.
func Main(name string, run func(ctx context.Context) (ok bool, err error)) {
	// A closed pipe (| head) must not end the program before its processes. Ignored, not
	// in NotifyContext: writing to a closed connection raises SIGPIPE too.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// Build builds warmroute from the working directory.
func Build(ctx context.Context, binary string) error {
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// Sleep waits for d, and returns the error of ctx if that has ended.
func Sleep(ctx context.Context, d time.Duration) error {
	clock.Sleep(ctx, d)
	return ctx.Err()
}
