// Package upstream sends a request to one replica: the header, the body with its edits, the ids by which a response is told from that to
// another request, the time limits, and what a prefill on one replica leaves for the decode on another.
package upstream

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/prompt"
)

// outgoingParts are the parts of a request to a replica, in one allocation.
type outgoingParts struct {
	url  url.URL
	body memoryBody
}

// memoryBody is a body in memory, which needs no closing.
type memoryBody struct{ bytes.Reader }

func (*memoryBody) Close() error { return nil }

// Request is what is sent to a replica.
type Request struct {
	Client        *http.Request // the client's request, whose header RewriteHeader has prepared
	Method        string
	Path, Query   string
	Body          []byte
	Edits         []prompt.Edit // of the body, in its order
	NotAfter      time.Time     // until when the end of the body may be sent; zero: whenever
	Backend       *backends.Backend
	Priority      int  // in the engine's queue, where the backend is sent one
	NewConnection bool // see transport.StaleError
}

// Send sends r, with the headers that its backend's options add, and returns the response. It
// changes the header of r.Client.
func Send(ctx context.Context, r *Request) (*http.Response, error) {
	b, header := r.Backend, r.Client.Header
	o := b.Options()
	delete(header, "Authorization") // of the backend tried before
	if o.APIKey != "" {
		header["Authorization"] = []string{"Bearer " + o.APIKey}
	}
	delete(header, vllm.RankHeader)
	if rank := b.RankHeader(); rank != nil {
		header[vllm.RankHeader] = rank
	}
	delete(header, enginePriorityHeader)
	if o.EnginePriority { // also 0, or the body's priority would count
		header[enginePriorityHeader] = []string{strconv.Itoa(r.Priority)}
	}
	sent := &outgoingParts{
		url:  url.URL{Scheme: b.URL.Scheme, Host: b.URL.Host, Path: b.URL.Path + r.Path, RawQuery: r.Query},
		body: memoryBody{*bytes.NewReader(r.Body)},
	}
	req := r.Client.WithContext(ctx) // the only way to a copy with another context
	req.Method, req.URL, req.Header = r.Method, &sent.url, header
	req.Body, req.ContentLength = &sent.body, int64(len(r.Body))
	if len(r.Body) == 0 {
		req.Body = http.NoBody
	}
	if len(r.Edits) > 0 {
		edited := newEditedBody(r.Body, r.Edits)
		edited.notAfter = r.NotAfter
		req.Body, req.ContentLength = edited, edited.length
	}
	req.Close = r.NewConnection
	return o.Transport.RoundTrip(req)
}
