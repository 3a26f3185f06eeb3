package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"warmroute/scripts/testbed"
)

// operator does to the fleet what people do to theirs, one thing after another, so
// that never more than one replica is away.
type operator struct {
	proxy    *testbed.Proxy
	replicas []*testbed.Replica
	done     map[string]int // what was done, and how often
}

// work does something every so often until ctx is done. What it has begun it ends.
func (o *operator) work(ctx context.Context, every time.Duration) error {
	acts := []struct {
		what string
		do   func(ctx context.Context, turn int, away func()) error
	}{
		{"a replica restarted", o.restart}, {"a reload and its reverse", o.reload},
		{"a replica killed", o.kill}, {"a replica drained", o.drain},
	}
	away := func() { wait(ctx, every/2) }
	for n := 0; wait(ctx, every/2); n++ {
		act := acts[n%len(acts)]
		if err := act.do(context.WithoutCancel(ctx), n/len(acts), away); err != nil {
			return fmt.Errorf("%s: %w", act.what, err)
		}
		o.done[act.what]++
	}
	return nil
}

// oneOf is a replica that others have the model of. The last has its own, and what a
// restart of it broke off waits; an operator who takes it away takes the model away.
func (o *operator) oneOf(turn int) int { return turn % (len(o.replicas) - 1) }

// In the functions below turn counts how often each was called.

func (o *operator) restart(ctx context.Context, turn int, away func()) error {
	return o.end(ctx, o.replicas[turn%len(o.replicas)], (*testbed.Replica).End, away)
}

func (o *operator) kill(ctx context.Context, turn int, away func()) error {
	return o.end(ctx, o.replicas[turn%len(o.replicas)], func(one *testbed.Replica) error { return testbed.Kill(one) }, away)
}

func (o *operator) end(ctx context.Context, one *testbed.Replica, end func(*testbed.Replica) error, away func()) error {
	if err := end(one); err != nil {
		return err
	}
	away()
	if err := one.Start(); err != nil {
		return err
	}
	return one.AwaitHealthy(ctx)
}

func (o *operator) drain(ctx context.Context, turn int, away func()) error {
	path := "/api/backends/" + o.replicas[o.oneOf(turn)].Name
	if err := o.proxy.Tell(ctx, path+"/drain"); err != nil {
		return err
	}
	away()
	return o.proxy.Tell(ctx, path+"/undrain")
}

// reload takes one backend out, gives another weight, and changes the policy; and
// back.
func (o *operator) reload(ctx context.Context, turn int, away func()) error {
	var changed []*testbed.Replica
	for i, one := range o.replicas {
		if i != o.oneOf(turn) {
			heavy := *one
			heavy.As = "weight: 2"
			changed = append(changed, &heavy)
		}
	}
	err := o.proxy.Reload(ctx, "ok", changed, "routing: {policy: least-load}")
	away()
	return errors.Join(err, o.proxy.Reload(ctx, "ok", o.replicas))
}
