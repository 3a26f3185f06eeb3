package proxy

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"warmroute/proxy/relay"
	"warmroute/proxy/stored"
	"warmroute/router"
)

// The ids that two keys choose are not the same one, whatever the replica does with them.
func TestChosenIDOfTwoKeys(t *testing.T) {
	for _, streams := range []string{"false", "true"} {
		t.Run("stream "+streams, func(t *testing.T) {
			f := serveStored(t, router.QueueSettings{}, keyOf("alice", nil), keyOf("bob", nil))
			ask := `{"model":"m", "input":"hi","stream":` + streams + `,"request_id":"m\u0069ne","user":"u"}`
			for _, key := range []string{"alice", "bob"} {
				status, answer, _ := f.requestTo("POST", "/v1/responses", ask, bearer(key)...)
				if status != 200 || strings.Contains(answer, "wr-") || !strings.Contains(answer, `"id":"m\u0069ne"`) {
					t.Fatalf("%s: status %d %s", key, status, answer)
				}
			}
			if a, b := f.kept[0].ids[0], f.kept[0].ids[1]; a == b || !strings.HasSuffix(a, "-m\\u0069ne") || len(a) != len(b) {
				t.Errorf("the replica has %q and %q", a, b)
			}
			if a := f.kept[0].ids[0]; !strings.HasPrefix(a, "resp_") {
				t.Errorf("older replicas take %q for no id of a response", a)
			}
			if got := f.replicas[0].requests()[0].body; strings.Replace(got, stored.ScopeOf("alice"), "", 1) != ask {
				t.Errorf("the replica got %s", got)
			}
		})
	}
}

func TestChosenIDIsOfItsKey(t *testing.T) {
	f := serveStored(t, router.QueueSettings{}, keyOf("alice", nil), keyOf("bob", nil), keyOf("carol", nil))
	for _, key := range []string{"alice", "bob", "alice"} { // again: the later one replaces the earlier one
		if status, answer, _ := f.requestTo("POST", "/v1/responses", `{"model":"m","input":"hi","request_id":"mine"}`,
			bearer(key)...); status != 200 {
			t.Fatalf("%s: status %d %s", key, status, answer)
		}
	}
	f.preferSecond()
	before := f.seenRequests()
	for _, id := range []string{"mine", "none", stored.ScopeOf("alice") + "mine", stored.ScopeOf("carol") + "mine"} {
		status, answer, _ := f.requestTo("GET", "/v1/responses/"+id, "", bearer("carol")...)
		wantMissing(t, status, answer, "response_not_found", "'"+id+"' not found: no replica is known to hold it")
		status, answer, _ = f.requestTo("POST", "/v1/responses", continuing(id), bearer("carol")...)
		wantMissing(t, status, answer, "previous_response_not_found", "'"+id+"' not found: no replica is known to hold it")
	}
	if n := f.seenRequests() - before; n != 0 {
		t.Errorf("%d requests for another key's ids reached a replica", n)
	}
	for _, key := range []string{"alice", "bob"} {
		if status, answer, _ := f.requestTo("GET", "/v1/responses/mine", "", bearer(key)...); status != 200 ||
			answer != responseObject("mine", "cancelled") {
			t.Errorf("%s: GET: status %d %s", key, status, answer)
		}
		if status, answer, _ := f.requestTo("GET", "/v1/responses/mine?stream=true&starting_after=0", "", bearer(key)...); status != 200 ||
			answer != strings.Join(streamedResponse("mine", "")[1:], "") {
			t.Errorf("%s: GET of a stream: status %d %s", key, status, answer)
		}
		status, answer, _ := f.requestTo("POST", "/v1/responses", continuing("mine"), bearer(key)...)
		if status != 200 || !strings.Contains(answer, `"previous_response_id":"mine"`) {
			t.Errorf("%s: next turn: status %d %s", key, status, answer)
		}
		// Both ids of a request are its key's.
		status, answer, _ = f.requestTo("POST", "/v1/responses", `{"request_id":"second","model":"m","input":"hi","previous_response_id":"mine"}`,
			bearer(key)...)
		if status != 200 || !strings.Contains(answer, `"id":"second","previous_response_id":"mine"`) {
			t.Errorf("%s: next turn with an id: status %d %s", key, status, answer)
		}
	}
	f.kept[0].clear()
	status, answer, _ := f.requestTo("GET", "/v1/responses/mine", "", bearer("alice")...)
	wantMissing(t, status, answer, "response_not_found", "'mine' not found: the replica that held it was restarted")
	if n := f.index.Len(); n != 5 {
		t.Errorf("%d responses are remembered, want 5", n)
	}
}

// An empty id is one as well for vLLM.
func TestEmptyIDIsOfItsKey(t *testing.T) {
	f := serveStored(t, router.QueueSettings{}, keyOf("alice", nil), keyOf("bob", nil))
	const ask = `{"model":"m","input":"hi","request_id":""}`
	if status, answer, _ := f.requestTo("POST", "/v1/responses", ask, bearer("alice")...); status != 200 ||
		!strings.Contains(answer, `"id":""`) {
		t.Fatalf("status %d %s", status, answer)
	}
	if got := f.replicas[0].requests()[0].body; got != strings.Replace(ask, `""`, `"`+stored.ScopeOf("alice")+`"`, 1) {
		t.Errorf("the replica got %s", got)
	}
	status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(""), bearer("bob")...)
	wantMissing(t, status, answer, "previous_response_not_found", "")
	if status, answer, _ := f.requestTo("POST", "/v1/responses", continuing(""), bearer("alice")...); status != 200 ||
		!strings.Contains(answer, `"previous_response_id":""`) {
		t.Errorf("its own key: status %d %s", status, answer)
	}
}

// Every attempt sends the id of the key, and an error that quotes it gets the client's back.
func TestChosenIDInRetriesAndErrors(t *testing.T) {
	quote := always(answered("400 Bad Request", `{"error":{"message":"input was {'request_id': '`+stored.ScopeOf("alice")+`mine'}"}}`))
	broken, second := &replica{script: always(answered("500 Internal Server Error", `{}`))}, &replica{script: quote}
	f := serve(t, withKeys(keyOf("alice", nil)), broken, second)
	const ask = `{"model":"m","input":"hi","request_id":"mine"}`
	resp, answer := f.post("/v1/responses", ask, bearer("alice")...)
	if resp.StatusCode != 400 || answer != `{"error":{"message":"input was {'request_id': 'mine'}"}}` {
		t.Errorf("status %d %s", resp.StatusCode, answer)
	}
	for _, r := range []*replica{broken, second} {
		if got := r.requests(); len(got) != 1 || got[0].body != strings.Replace(ask, "mine", stored.ScopeOf("alice")+"mine", 1) {
			t.Errorf("a replica got %+v", got)
		}
	}
}

// A response that is too long to be buffered whole has the client's id as well.
func TestChosenIDInLongResponse(t *testing.T) {
	object := strings.Replace(responseObject(stored.ScopeOf("alice")+"mine", "completed"), "Hello",
		strings.Repeat("x", relay.MaxBufferedBytes), 1)
	f := serve(t, withKeys(keyOf("alice", nil)), &replica{script: always(answered("200 OK", object))})
	resp, answer := f.post("/v1/responses", `{"model":"m","input":"hi","request_id":"mine"}`, bearer("alice")...)
	if want := strings.Replace(object, stored.ScopeOf("alice"), "", 1); resp.StatusCode != 200 || answer != want {
		t.Errorf("status %d, %d bytes: %.100s, want %d bytes", resp.StatusCode, len(answer), answer, len(want))
	}
}

// pieces is a body that is read in pieces.
type pieces struct {
	relay.Body
	rest [][]byte
}

func (p *pieces) Read(b []byte) (n int, err error) {
	if len(p.rest) == 0 {
		return 0, io.EOF
	}
	n = copy(b, p.rest[0])
	if p.rest[0] = p.rest[0][n:]; len(p.rest[0]) == 0 {
		p.rest = p.rest[1:]
	}
	return n, nil
}

// removeOnce returns text without each scope that is not directly behind another one.
func removeOnce(text, scope string) string {
	before, after, found := strings.Cut(text, scope)
	switch {
	case !found:
		return text
	case after == "":
		return before
	}
	return before + after[:1] + removeOnce(after[1:], scope)
}

func FuzzUnscopedBody(f *testing.F) {
	f.Add([]byte(`{"id":"wr-1-mine"}`), "wr-1-", byte(3))
	f.Add([]byte("wr-1-wr-1-x wr-1-wr-1-wr-1-"), "wr-1-", byte(1))
	f.Add([]byte("aaaaaaaaaa"), "aab", byte(2))
	f.Add([]byte("aaaaaaaaaa"), "aa", byte(2))
	f.Add(bytes.Repeat([]byte("wr-1-mine "), 2000), "wr-1-", byte(200))
	f.Fuzz(func(t *testing.T, text []byte, scope string, size byte) {
		if scope == "" || len(scope) > 64 || size == 0 {
			return
		}
		var source pieces
		for i := 0; i < len(text); i += int(size) {
			source.rest = append(source.rest, text[i:min(i+int(size), len(text))])
		}
		body := &relay.UnscopedBody{Body: &source, Scope: []byte(scope), Buf: make([]byte, relay.ChunkBytes)}
		var got []byte
		for p := make([]byte, 7); ; {
			n, err := body.Read(p)
			got = append(got, p[:n]...)
			if errors.Is(err, io.EOF) {
				break
			}
		}
		if want := removeOnce(string(text), scope); string(got) != want {
			t.Errorf("%q without %q is %q, want %q", text, scope, got, want)
		}
	})
}
