package cli

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestDemoPage(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), ignoreCleaner)
	p, err := newDemoPage("127.0.0.1:0", "Title")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	defer serving.Wait()
	defer stop()
	serving.Go(func() {
		if err := p.run(ctx); err != nil {
			t.Error(err)
		}
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	get := func(path string) string {
		t.Helper()
		resp, err := client.Get(p.url() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d, %v", path, resp.StatusCode, err)
		}
		return string(body)
	}
	if page := get("/"); !strings.Contains(page, "fetch('/results'") {
		t.Errorf("got %s", page)
	}
	want := demoState{"Title", "chats", 3, []string{"http://a/", "http://b/"}, demoSummaries()}
	p.update(want)
	var got demoState
	if err := json.Unmarshal([]byte(get("/results")), &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestDemoScreenLinesAreRare(t *testing.T) {
	s := newDemoScreen(io.Discard)
	var at []int
	for elapsed := 500 * time.Millisecond; elapsed < 16*time.Second; elapsed += 500 * time.Millisecond {
		if s.isUpdateDue(elapsed) {
			at = append(at, int(elapsed/time.Millisecond))
		}
	}
	if want := []int{2000, 5000, 10_000, 15_000}; !reflect.DeepEqual(at, want) {
		t.Errorf("lines after %v ms, want %v", at, want)
	}
	if s.terminal = true; !s.isUpdateDue(0) {
		t.Error("a terminal is not updated")
	}
}

func TestWrapText(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", ""}, {"one", "one"}, {"one two three", "one two\nthree"}, {"longerthanwidth a b", "longerthanwidth\na b"},
	} {
		if got := wrapText(c.text, 8); got != c.want {
			t.Errorf("%q: got %q, want %q", c.text, got, c.want)
		}
	}
}
