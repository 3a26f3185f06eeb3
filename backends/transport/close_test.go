package transport

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"
)

func TestCloseEndsWhatIsUnderWayAndRefusesWhatComes(t *testing.T) {
	asked := make(chan struct{}, 2)
	replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			io.WriteString(w, "a beginning")
			w.(http.Flusher).Flush()
		}
		asked <- struct{}{}
		<-r.Context().Done()
	}))
	defer replica.Close()
	u, _ := url.Parse(replica.URL)
	tr := New(Options{URL: u, IdleTimeout: 20 * time.Millisecond})
	request := func(path string) *http.Request {
		req, _ := http.NewRequestWithContext(context.Background(), http.MethodGet, replica.URL+path, nil)
		return req
	}
	resp, err := tr.RoundTrip(request("/stream"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	waiting := make(chan error)
	go func() {
		_, err := tr.RoundTrip(request("/silence"))
		waiting <- err
	}()
	<-asked
	<-asked
	if n := tr.Open(); n != 2 {
		t.Errorf("%d connections are open, want 2", n)
	}
	tr.Close()
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the stream came to its end")
	}
	if err := <-waiting; err == nil {
		t.Error("an answer came over a closed connection")
	}
	resp.Body.Close()
	var refused *ConnectError
	if _, err := tr.RoundTrip(request("/")); !errors.As(err, &refused) {
		t.Errorf("after Close: %v, want a ConnectError", err)
	}
	for end := time.Now().Add(30 * time.Second); tr.Open() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d connections are still counted", tr.Open())
		}
	}
	tr.Close() // a second time
}
