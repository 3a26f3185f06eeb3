package cli

import (
	"context"
	_ "embed" // for the page
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"warmroute/lab/replay"
)

//go:embed demo_page/index.html
var demoPageHTML []byte

// demoPage serves a page with the results of both fleets of a demo.
type demoPage struct {
	listener net.Listener
	state    atomic.Pointer[[]byte] // JSON of a demoState
}

// demoState is what the page shows.
type demoState struct {
	Title     string           `json:"title"`
	Traffic   string           `json:"traffic"` // describes it
	Elapsed   float64          `json:"elapsed_seconds"`
	LivePages []string         `json:"live_pages"` // of each fleet's proxy
	Results   []replay.Summary `json:"results"`
}

// newDemoPage returns a page with a title that listens on the address.
func newDemoPage(addr, title string) (*demoPage, error) {
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	p := &demoPage{listener: listener}
	p.update(demoState{Title: title, LivePages: []string{}, Results: []replay.Summary{}})
	return p, nil
}

func (p *demoPage) url() string { return localBaseURL(p.listener.Addr()) }

// update makes the page show a state.
func (p *demoPage) update(s demoState) {
	text, _ := json.Marshal(s) // strings and finite numbers always marshal
	p.state.Store(&text)
}

// run serves the page until ctx is done.
func (p *demoPage) run(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy",
			"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'")
		w.Write(demoPageHTML)
	})
	mux.HandleFunc("GET /results", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Write(*p.state.Load())
	})
	s := &http.Server{Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { s.Close() })()
	if err := s.Serve(p.listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
