package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"warmroute/loadgen"
)

// think is the mean pause of a user between two requests.
const think = 200 * time.Millisecond

// outcomes counts what became of the requests of each kind. Safe for concurrent use.
type outcomes struct {
	mu     sync.Mutex
	sent   map[string]int
	failed map[string]int // by kind and cause: what is neither fine nor excused
	first  []string       // of those, for people
	broken int            // streams that a restarted replica broke off, and said so
	over   int            // requests beyond the bounds of their key
}

// unread is how much of a body that was refused the proxy reads: of a longer one its
// client may see nothing but the end of the connection.
const unread = 256 << 10

func (o *outcomes) add(k *kind, a loadgen.Request, bounded bool, r loadgen.Response) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sent[k.name]++
	if bounded && (r.Err == "status 429" || r.Err == loadgen.NoConnection && len(a.Body) > unread) {
		o.over++
		return
	}
	if slices.Contains(k.fine, r.Err) {
		return
	}
	if a.Stream && r.Committed && r.Err == loadgen.StreamError {
		o.broken++
		return
	}
	o.failed[k.name+": "+r.Err]++
	if len(o.first) < 10 {
		o.first = append(o.first, fmt.Sprintf("%s: %s (status %d, from %q, after %v): %s", k.name, r.Err, r.Status, r.Backend, time.Since(r.Sent).Round(time.Millisecond), r.Detail))
	}
}

// The keys of the users, which the keys file has in plain.
const (
	freeKey    = "soak-free-0123456789abcdef"
	boundedKey = "soak-bounded-0123456789abcdef"
)

// play keeps users busy until ctx is done, and then waits for their last answers.
// With roots they come by TLS, a third of them over HTTP/2.
func play(ctx context.Context, url string, users int, roots *x509.CertPool, o *outcomes) {
	var all sync.WaitGroup
	for i := range users {
		all.Go(func() {
			from := rand.New(rand.NewPCG(1, uint64(i)))
			client := newClient(i%4 == 0, roots, i%3 == 0)
			defer client.CloseIdleConnections()
			key, bounded := freeKey, i/4%4 == 1
			if bounded {
				key = boundedKey
			}
			player := &loadgen.Client{URL: url, APIKey: key, HTTP: client, Speed: 1, Timeout: 2 * time.Minute}
			for wait(ctx, time.Duration(from.ExpFloat64()*float64(think))) {
				k := draw(from)
				a := k.ask(from)
				// Not under ctx: what is under way at the end has to come to its own.
				o.add(k, a, bounded, player.Send(context.WithoutCancel(ctx), a))
			}
		})
	}
	all.Wait()
}

// newClient has little room for what it does not read. One that churns makes a
// connection for each request.
func newClient(churns bool, roots *x509.CertPool, http2 bool) *http.Client {
	client := loadgen.NewHTTPClient()
	transport := client.Transport.(*http.Transport)
	transport.DisableKeepAlives = churns
	transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	transport.ForceAttemptHTTP2 = http2 && roots != nil
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, address)
		if err == nil {
			err = conn.(*net.TCPConn).SetReadBuffer(8 << 10)
		}
		return conn, err
	}
	return client
}

// wait returns false when ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
