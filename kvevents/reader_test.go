package kvevents

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// Where a replica publishes is looked up again after an error.
func TestSourcesAfterError(t *testing.T) {
	asked := make(chan struct{}, 10)
	replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked <- struct{}{}; len(asked) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		w.Write([]byte(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}}`))
	}))
	defer replica.Close()
	u, err := backends.ParseURL(replica.URL)
	if err != nil {
		t.Fatal(err)
	}
	b := backends.New("a", u, "", http.DefaultTransport)
	o := *b.Options()
	o.KVEvents = backends.KVEventsAuto
	b.SetOptions(o)
	b.SetState(backends.Ready)
	registry, err := backends.NewRegistry([]*backends.Backend{b})
	if err != nil {
		t.Fatal(err)
	}
	r, err := router.New(router.Options{
		Settings: router.Settings{Policy: "prefix"}, Backends: registry.All(), BlockBytes: 256, IndexMaxBytes: 1 << 20, Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	reader := NewReader(registry, r, slog.New(slog.DiscardHandler), nil)
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { reader.Watch(ctx, b) })
	defer watching.Wait()
	defer stop()
	isReading := func() bool {
		reader.mu.Lock()
		defer reader.mu.Unlock()
		return reader.readings[b] != nil
	}
	for deadline := time.Now().Add(time.Minute); !isReading(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the events are not read within a minute")
		}
	}
}
