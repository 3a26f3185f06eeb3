package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"

	"warmroute/backends"
	"warmroute/config"
)

// slowStore is a Store whose writes take until release, once for each.
type slowStore struct {
	release chan error // what the write returns
	writes  int
	records int // of the last write
}

func (s *slowStore) ReadRecords(context.Context) (map[string][]byte, error) { return nil, nil }

func (s *slowStore) WriteRecords(ctx context.Context, changed map[string][]byte, _ []string) error {
	s.writes, s.records = s.writes+1, len(changed)
	select {
	case err := <-s.release:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Changes during a write are written together with the next, and none counts as stored before it is.
func TestChangesAreStoredTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &slowStore{release: make(chan error)}
		f := New(Options{Initial: &Initial{config: &config.Config{}}, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Shared: store})
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		defer work.Wait()
		defer cancel()
		work.Go(func() { f.exchangeRepeatedly(ctx, f.exchanges[0]) })
		synctest.Wait() // until its first exchange is done: it might write a change that it does not count as included
		results := make(chan error, 100)
		drain := func(i int) {
			u, _ := backends.ParseURL(fmt.Sprintf("http://10.0.0.%d:8000", i))
			f.SetDrained(backends.New(fmt.Sprint("gpu-", i), u, "", nil), true)
			work.Go(func() { results <- f.WaitStored(ctx) })
		}
		drain(0)
		synctest.Wait()
		for i := range 99 {
			drain(1 + i)
		}
		synctest.Wait()
		if store.writes != 1 || store.records != 1 || len(results) != 0 {
			t.Errorf("%d writes, the last of %d records; %d are told that it is stored", store.writes, store.records, len(results))
		}
		store.release <- nil
		synctest.Wait()
		if err := <-results; err != nil || store.writes != 2 || store.records != 100 || len(results) != 0 {
			t.Errorf("%v; %d writes, the last of %d records; %d more are told", err, store.writes, store.records, len(results))
		}
		full := errors.New("disk full")
		store.release <- full
		for range 99 {
			if err := <-results; !errors.Is(err, full) {
				t.Errorf("got %v, want the error of the store", err)
			}
		}
	})
}
