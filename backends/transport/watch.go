package transport

import "context"

// caller is a context that calls back by itself when it ends. With one, a request
// needs nothing of package context: no context that hangs on it, no channel.
type caller interface {
	AfterFunc(f func()) (stop func() bool) // as context.AfterFunc
	Cause() error                          // as context.Cause
}

func afterFunc(ctx context.Context, f func()) (stop func() bool) {
	if c, ok := ctx.(caller); ok {
		return c.AfterFunc(f)
	}
	return context.AfterFunc(ctx, f)
}

func cause(ctx context.Context) error {
	if c, ok := ctx.(caller); ok {
		return c.Cause()
	}
	return context.Cause(ctx)
}
