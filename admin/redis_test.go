package admin

import (
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"warmroute/cluster"
	"warmroute/proxy/apikey"
	"warmroute/router"
)

func TestRedisState(t *testing.T) {
	if s := New(Options{}).redisState(); s != nil {
		t.Errorf("a proxy that is alone has %+v", s)
	}
	r, err := router.New(router.Options{
		Settings: router.Settings{Policy: "prefix"}, BlockBytes: 256, IndexMaxBytes: 1 << 20, Now: time.Now, Rand: rand.NewPCG(1, 1),
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := cluster.New(cluster.Options{
		Settings: cluster.Settings{URL: "unix:///none", Mode: cluster.ModeSingle}, BlockBytes: 256,
		Outbox: cluster.NewOutbox(), Router: r, Keys: apikey.New(nil), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	s := New(Options{Cluster: c.Status}).redisState()
	if s == nil || s.Connected || s.Reason == "" || s.Since.IsZero() || s.Proxies != 1 {
		t.Errorf("before the first connection: %+v", s)
	}
}
