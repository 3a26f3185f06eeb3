package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"warmroute/clock"
)

const (
	trickleConnections = 40
	trickleAddress     = "127.0.0.2" // not the clients' own
	trickleBytes       = 1 << 20     // sent at once by each connection, of a body of trickleLength
	trickleLength      = 16 << 20
	trickleInterval    = 500 * time.Millisecond // between the bytes after that
	// The memory of all bodies is what these connections alone would use up.
	trickleSettings = "limits: {body_bytes: 16MiB, body_bytes_total: 32MiB}"
	trickleIdle     = 3 * time.Second // timeouts.body_idle
)

// trickleBodies sends large bodies from another address, which slow down to two bytes a second.
// No request of the clients may fail, and each of these bodies ends with a 408, or a 503 for its
// address alone.
func trickleBodies(ctx context.Context, r *rig) error {
	if err := r.proxy.Reload(ctx, "ok", r.replicas, trickleSettings, fmt.Sprintf("timeouts: {body_idle: %v}", trickleIdle)); err != nil {
		return err
	}
	statuses, errs := make([]int, trickleConnections), make([]error, trickleConnections)
	var all sync.WaitGroup
	for i := range trickleConnections {
		all.Go(func() { statuses[i], errs[i] = r.trickleBody(ctx) })
	}
	err := r.awaitResponses(ctx, 100)
	all.Wait()
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	ends := map[int]int{}
	for _, status := range statuses {
		ends[status]++
	}
	r.verdict.addMeasurement("bodies that trickle, by status: %v", ends)
	r.verdict.require(ends[http.StatusRequestTimeout] > 0 && ends[http.StatusServiceUnavailable] > 0 &&
		ends[http.StatusRequestTimeout]+ends[http.StatusServiceUnavailable] == trickleConnections,
		"bodies that trickle ended with %v by status, want 408 and 503", ends)
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

const (
	withheldConnections = 150
	// The places are what these connections alone would use up. A quarter of them leaves one for each client.
	withheldSettings = "limits: {in_flight: 80}"
)

// withholdBodies sends the headers of requests from another address, and no bodies, and repeats what is refused. No request
// of the clients may fail.
func withholdBodies(ctx context.Context, r *rig) error {
	if err := r.proxy.Reload(ctx, "ok", r.replicas, withheldSettings, fmt.Sprintf("timeouts: {body_idle: %v}", trickleIdle)); err != nil {
		return err
	}
	var mu sync.Mutex
	ends := map[int]int{}
	sending, stop := context.WithCancel(ctx)
	defer stop()
	all, senders := errgroup.WithContext(sending)
	for range withheldConnections {
		all.Go(func() error {
			for senders.Err() == nil {
				status, err := r.withholdBody(senders)
				if err != nil {
					return err
				}
				mu.Lock()
				ends[status]++ // 0 at the end
				mu.Unlock()
				clock.Sleep(senders, trickleInterval)
			}
			return nil
		})
	}
	err := r.awaitResponses(ctx, 300)
	stop()
	if err := errors.Join(all.Wait(), err); err != nil {
		return err
	}
	r.verdict.addMeasurement("requests without a body, by status: %v", ends)
	r.verdict.require(ends[http.StatusServiceUnavailable] > 0, "requests without a body ended with %v by status, want some 503", ends)
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// trickleBody sends the beginning of a body at once and then a byte at a time, until there is a
// response.
func (r *rig) trickleBody(ctx context.Context) (status int, err error) {
	conn, err := r.beginBody(ctx)
	if err != nil {
		return 0, err
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	defer conn.Close() // which ends a write
	// Writes fail once the proxy has refused the body. Its response tells.
	responded := make(chan struct{})
	sending.Go(func() {
		fmt.Fprint(conn, strings.Repeat(" ", trickleBytes))
		for {
			select {
			case <-responded:
				return
			case <-time.After(trickleInterval):
				fmt.Fprint(conn, " ")
			}
		}
	})
	defer close(responded)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

// beginBody sends the header of a request with a large body from another address.
func (r *rig) beginBody(ctx context.Context) (conn net.Conn, err error) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(trickleAddress)}}
	if conn, err = dialer.DialContext(ctx, "tcp", strings.TrimPrefix(r.proxy.URL, "http://")); err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(waitTimeout)); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n", trickleLength)
	return conn, nil
}

// withholdBody sends the header of a request and waits for a response. The status is 0 if ctx ends first.
func (r *rig) withholdBody(ctx context.Context) (status int, err error) {
	conn, err := r.beginBody(ctx)
	if err == nil {
		defer conn.Close()
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		var resp *http.Response
		if resp, err = http.ReadResponse(bufio.NewReader(conn), nil); err == nil {
			return resp.StatusCode, resp.Body.Close()
		}
	}
	if ctx.Err() != nil {
		return 0, nil
	}
	return 0, err
}
