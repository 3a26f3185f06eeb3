package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

// Main runs a program that has processes to clean up, and exits: with 1 when what
// it looked for was not so, with 2 when it could not look. An interrupt ends ctx.
func Main(name string, run func(ctx context.Context) (ok bool, err error)) {
	// | head must not leave processes behind. (Not notified of: any connection that
	// a peer has closed would tell.)
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

// Build makes warmroute of the checkout that is the working directory.
func Build(ctx context.Context, binary string) error {
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}
