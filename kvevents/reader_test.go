package kvevents

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/kvevents/wire"
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
	connections := transport.New(transport.Options{URL: u, IdleTimeout: 100 * time.Millisecond})
	defer connections.Close()
	b := backends.New("a", u, "", connections)
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
	reader := NewReader(registry, r, slog.New(slog.DiscardHandler), nil, nil)
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

// A rank reads the events of its own engine only, which is the only one of its backend.
func TestSourcesOfRank(t *testing.T) {
	replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write([]byte(`{"4":{"endpoint":"tcp://10.0.0.5:6000"},"5":{"endpoint":"tcp://10.0.0.5:6001","replay_endpoint":"tcp://10.0.0.5:7001"}}`))
	}))
	defer replica.Close()
	u, err := backends.ParseURL(replica.URL)
	if err != nil {
		t.Fatal(err)
	}
	connections := transport.New(transport.Options{URL: u, IdleTimeout: 100 * time.Millisecond})
	defer connections.Close()
	for _, c := range []struct {
		engine int
		events string
		want   []wire.Source
	}{
		{5, backends.KVEventsAuto, []wire.Source{{Endpoint: "tcp://10.0.0.5:6001", Replay: "tcp://10.0.0.5:7001"}}},
		{6, backends.KVEventsAuto, nil},
		{5, backends.KVEventsOff, nil},
		{2, "tcp://10.0.0.5:5557", []wire.Source{{Endpoint: "tcp://10.0.0.5:5559", Replay: "tcp://10.0.0.5:5560", RefuseLocal: true}}},
	} {
		server := backends.New("a", u, "", connections)
		o := *server.Options()
		if o.KVEvents = c.events; c.events != backends.KVEventsAuto && c.events != backends.KVEventsOff {
			o.KVReplay, o.RefuseLocal = "tcp://10.0.0.5:5558", true
		}
		server.SetOptions(o)
		rank := backends.NewRank(server, c.engine, 0)
		got, err := findSources(t.Context(), rank, readSourceSettings(rank), wire.Ports{})
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("engine %d, %s: %+v, %v, want %+v", c.engine, c.events, got, err, c.want)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}
