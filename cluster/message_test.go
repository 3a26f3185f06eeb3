package cluster

import (
	"bytes"
	"fmt"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router"
	"warmroute/router/queue"
)

// newBackend returns a backend that an address names.
func newBackend(t testing.TB, address string) *backends.Backend {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	return &backends.Backend{Name: address, URL: u}
}

// testAddress returns the address of a backend of newBackend.
func testAddress(b *backends.Backend) string { return backends.NormalizeURL(b.URL) }

// sampleEvents returns one event of each kind for a backend.
func sampleEvents(b *backends.Backend) []router.PlacementEvent {
	return []router.PlacementEvent{
		{Kind: router.PlacementSent, Placement: router.Placement{
			ID: 1 << 40, Backend: b, Model: "m", Adapter: "a", Blocks: []prompt.Block{1, 1 << 63, 3},
			Forks: []prompt.Fork{{Bit: prompt.ToolsFirst, Without: 0.25, WithoutMost: 0.5, With: 1}},
			Bytes: 1000, PromptTokens: 250, UncachedTokens: 50, Sequences: 3, MaxOutput: 77, Class: queue.LowPriority, TextClass: prompt.TokenIDs,
			Turn: prompt.TurnLater, PromptKey: 5, Conversation: 6, Tenant: 7, RequestKind: router.DecodeRequest, Retry: true, Streams: true,
			NonGenerative: true, IsText: true, TooLong: true,
		}},
		{Kind: router.PlacementPrefilled, Placement: router.Placement{ID: 7}},
		{Kind: router.PlacementEnded, Placement: router.Placement{ID: 7}, End: router.PlacementEnd{
			Outcome: router.Outcome{End: router.Completed, OutputTokens: 5, PromptTokens: 6, CachedTokens: 0, CachedKnown: true,
				Reply: []prompt.Block{9}},
			TTFT: 1500 * time.Microsecond, QueuedAhead: 3000,
		}},
		{Kind: router.PlacementIndexed, Placement: router.Placement{Backend: b, Blocks: []prompt.Block{4, 5}}},
	}
}

// testTime is when the messages of tests are written.
var testTime = time.UnixMilli(1_700_000_000_123)

func TestMessageRoundTrip(t *testing.T) {
	b := newBackend(t, "http://10.0.0.1:8000")
	events := sampleEvents(b)
	e := newEncoder(testAddress)
	for i := range events {
		e.addEvent(&events[i])
	}
	e.addKeyUsage(&keyUsage{"key", 3, -400})
	e.addResponse(updateResponse, &storedResponse{"resp_1", "http://10.0.0.1:8000", "key"})
	e.addResponse(updateForgotten, &storedResponse{id: "resp_2"})
	e.start(updateLeaving)
	data := e.message(messageHead{1, 2, 3, testTime}, authenticator{})
	m, rest, err := parseHead(data, authenticator{})
	if err != nil {
		t.Fatal(err)
	}
	if m != (messageHead{1, 2, 3, testTime}) {
		t.Errorf("head %+v", m)
	}
	updates, err := parseUpdates(rest, func(address string) *backends.Backend {
		if address == "http://10.0.0.1:8000" {
			return b
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []update{
		{kind: updateSent, event: events[0]}, {kind: updatePrefilled, event: events[1]}, {kind: updateEnded, event: events[2]},
		{kind: updateIndexed, event: events[3]},
		{kind: updateKeyUsage, usage: keyUsage{"key", 3, -400}},
		{kind: updateResponse, response: storedResponse{"resp_1", "http://10.0.0.1:8000", "key"}},
		{kind: updateForgotten, response: storedResponse{id: "resp_2"}},
		{kind: updateLeaving},
	}
	if !reflect.DeepEqual(updates, want) {
		t.Errorf("got  %+v\nwant %+v", updates, want)
	}
}

func TestDamagedMessages(t *testing.T) {
	b := newBackend(t, "http://10.0.0.1:8000")
	e := newEncoder(testAddress)
	for _, v := range sampleEvents(b) {
		e.addEvent(&v)
	}
	good := e.message(messageHead{1, 2, 3, testTime}, authenticator{})
	find := func(string) *backends.Backend { return b }
	parse := func(data []byte) error {
		_, rest, err := parseHead(data, authenticator{})
		if err == nil {
			_, err = parseUpdates(rest, find)
		}
		return err
	}
	if err := parse(good); err != nil {
		t.Fatal(err)
	}
	for i := range good {
		changed := append([]byte(nil), good...)
		changed[i] ^= 1
		if parse(changed) == nil {
			t.Errorf("byte %d was changed, which is not noticed", i)
		}
		if parse(good[:i]) == nil {
			t.Errorf("message of %d bytes is accepted", i)
		}
	}
	// Behind a right checksum.
	for i := range e.Data {
		cut := *e
		cut.Data = e.Data[:i]
		_, rest, err := parseHead(cut.message(messageHead{1, 2, 3, testTime}, authenticator{}), authenticator{})
		if err != nil {
			t.Fatal(err)
		}
		updates, err := parseUpdates(rest, find)
		if err == nil && len(updates) > 3 {
			t.Errorf("%d updates of %d bytes", len(updates), i)
		}
	}
}

func TestMessageSignature(t *testing.T) {
	e := newEncoder(testAddress)
	e.addResponse(updateResponse, &storedResponse{"resp_1", "http://10.0.0.1:8000", "key"})
	plain, signed := authenticator{prefix: "a:"}, authenticator{secret: "secret", prefix: "a:"}
	for _, c := range []struct {
		name           string
		writer, reader authenticator
		want           string // in the error; "": none
	}{
		{"same secret", signed, signed, ""},
		{"no secrets", plain, plain, ""},
		{"no secrets, other prefix", plain, authenticator{prefix: "b:"}, ""},
		{"writer has no secret", plain, signed, "message is not signed"},
		{"reader has no secret", signed, plain, "redis.secret_file is not set"},
		{"other secret", authenticator{secret: "other", prefix: "a:"}, signed, "invalid signature"},
		{"other prefix", authenticator{secret: "secret", prefix: "b:"}, signed, "invalid signature"},
	} {
		data := e.message(messageHead{1, 2, 3, testTime}, c.writer)
		_, _, err := parseHead(data, c.reader)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want an error with %q", c.name, err, c.want)
		}
	}
	good := e.message(messageHead{1, 2, 3, testTime}, signed)
	for i := range good {
		changed := bytes.Clone(good)
		changed[i] ^= 1
		if _, _, err := parseHead(changed, signed); err == nil {
			t.Errorf("a changed byte %d is accepted", i)
		}
		if _, _, err := parseHead(good[:i], signed); err == nil {
			t.Errorf("a message of %d bytes is accepted", i)
		}
	}
}

// A message of a proxy that codes other fields has another version: that it is damaged would be wrong.
func TestMessageOfAnotherVersion(t *testing.T) {
	e := newEncoder(testAddress)
	e.start(updateLeaving)
	for _, a := range []authenticator{{}, {secret: "secret"}} {
		for _, version := range []byte{1, 2, signedVersion + 1} {
			data := e.message(messageHead{1, 2, 3, testTime}, a)
			data[len(messageMagic)] = version
			want := fmt.Sprintf("message has version %d, expected %d", version, a.messageVersion())
			if _, _, err := parseHead(data, a); err == nil || err.Error() != want {
				t.Errorf("signed %v: %v, want %s", a.isSigned(), err, want)
			}
		}
	}
}

// Messages of other bytes need other versions.
func TestGoldenMessage(t *testing.T) {
	b := newBackend(t, "http://10.0.0.1:8000")
	e := newEncoder(testAddress)
	for _, v := range sampleEvents(b) {
		e.addEvent(&v)
	}
	e.start(updateInFlight)
	e.Count(1, maxInFlight, minAccountBytes)
	e.account(&sampleEvents(b)[0].Placement)
	e.addKeyUsage(&keyUsage{"key", 3, -400})
	e.addResponse(updateResponse, &storedResponse{"resp_1", "http://10.0.0.1:8000", "key"})
	e.addResponse(updateForgotten, &storedResponse{id: "resp_2"})
	e.start(updateLeaving)
	data := e.message(messageHead{1, 2, 3, testTime}, authenticator{})
	const version, sum = 3, 0x753ab877bfea5177
	if got := xxh3.Hash(data); got != sum || data[len(messageMagic)] != version {
		t.Errorf("version %d with the sum %#x, want version %d with %#x: if updates are coded in another way, change "+
			"plainVersion and signedVersion to numbers that no proxy has used, and this test", data[len(messageMagic)], got, version, uint64(sum))
	}
}

func FuzzRecords(f *testing.F) {
	b := newBackend(f, "http://10.0.0.1:8000")
	e := newEncoder(testAddress)
	for _, v := range sampleEvents(b) {
		e.addEvent(&v)
	}
	e.addKeyUsage(&keyUsage{"key", 3, -400})
	e.addResponse(updateResponse, &storedResponse{"resp_1", "http://10.0.0.1:8000", "key"})
	good := e.message(messageHead{1, 2, 3, testTime}, authenticator{})
	f.Add(good[headBytes : len(good)-authenticator{}.sumSize()])
	o := NewOutbox()
	for _, v := range sampleEvents(b) {
		o.ReportPlacement(&v)
	}
	o.addInFlight()
	good = o.removeOldest().message(messageHead{1, 2, 3, testTime}, authenticator{})
	f.Add(good[headBytes : len(good)-authenticator{}.sumSize()])
	f.Fuzz(func(t *testing.T, data []byte) {
		updates, err := parseUpdates(data, func(string) *backends.Backend { return b })
		if err != nil {
			return
		}
		again := newEncoder(testAddress)
		for i := range updates {
			switch r := &updates[i]; r.kind {
			case updateSent, updatePrefilled, updateEnded, updateIndexed:
				again.addEvent(&r.event)
			case updateKeyUsage:
				again.addKeyUsage(&r.usage)
			case updateResponse, updateForgotten:
				again.addResponse(r.kind, &r.response)
			}
		}
		m := again.message(messageHead{1, 2, 3, testTime}, authenticator{})
		if len(m) > maxMessageBytes {
			return
		}
		if _, rest, err := parseHead(m, authenticator{}); err != nil {
			t.Error(err)
		} else if _, err := parseUpdates(rest, func(string) *backends.Backend { return b }); err != nil {
			t.Errorf("what was read cannot be read again: %v", err)
		}
	})
}

func FuzzHead(f *testing.F) {
	signed := authenticator{secret: "secret", prefix: "a:"}
	f.Add(newEncoder(testAddress).message(messageHead{1, 2, 3, testTime}, authenticator{}))
	f.Add(newEncoder(testAddress).message(messageHead{1, 2, 3, testTime}, signed))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, a := range []authenticator{{}, signed} {
			if _, rest, err := parseHead(data, a); err == nil && len(rest) >= len(data) {
				t.Errorf("%d of %d bytes are left", len(rest), len(data))
			}
		}
	})
}

func TestEntryTime(t *testing.T) {
	for _, id := range []string{"1795660997804-0", "1795660997804-9", "1795660997804-10", "1795660997804-18446744073709551615",
		"1795660997804"} {
		if at := entryTime(id).UnixMilli(); at != 1795660997804 {
			t.Errorf("%s: %d ms", id, at)
		}
	}
}
