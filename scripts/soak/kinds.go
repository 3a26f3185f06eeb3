package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"warmroute/loadgen"
)

// kind is a kind of request, and what may become of it.
type kind struct {
	name   string
	weight int // how often it comes, among the others
	ask    func(*rand.Rand) loadgen.Request
	// fine are the outcomes that are right, as Result.Err has them. "" is an answer.
	// Beside them a replica that is restarted may break off what had begun.
	fine []string
}

// What the proxy is told, so that its limits are met within a run.
const (
	bodyLimit = 4 << 20
	bodyIdle  = 15 * time.Second // well above what a slow client pauses for: a busy machine adds seconds
	writeIdle = 6 * time.Second
)

// settings are the proxy's, for so many users, with files below dir: a quarter of
// the users has a key with bounds that they exceed now and then.
func settings(dir string, users int, secure bool) string {
	s := fmt.Sprintf(`
limits: {body_bytes: 4MiB}
timeouts: {body_idle: %v, write_idle: %v}
sse: {keepalive: 1s}
keys: [{name: bounded, requests_per_minute: %d, concurrency: %d}]
keys_file: %q`, bodyIdle, writeIdle, 15*users, users/5+1, filepath.Join(dir, "keys"))
	if secure {
		s += fmt.Sprintf("\ntls: {cert_file: %q, key_file: %q}", filepath.Join(dir, certFile), filepath.Join(dir, keyFile))
	}
	return s
}

// models are those of the fleet: one on most replicas, with an adapter, and one
// that a single replica has.
var models = []string{"sim", "sim", "sim", "sql", "other"}

var kinds = []kind{
	{"streams", 30, chat(true, 10, 60, loadgen.ClientBehavior{}), []string{""}},
	{"whole answers", 20, chat(false, 10, 60, loadgen.ClientBehavior{}), []string{""}},
	{"completions", 6, completion, []string{""}},
	{"embeddings", 6, embedding, []string{""}},
	{"leave in upload", 4, large(loadgen.ClientBehavior{DisconnectInBody: true}), []string{loadgen.ClientDisconnected}},
	{"leave before the answer", 5, leaveEarly, []string{loadgen.ClientDisconnected, ""}},
	{"leave in a stream", 8, chat(true, 20, 60, loadgen.ClientBehavior{DisconnectAtEvent: 5}), []string{loadgen.ClientDisconnected, ""}},
	{"leave a whole answer", 4, chat(false, 200, 200, loadgen.ClientBehavior{DisconnectAfter: 30 * time.Millisecond}), []string{loadgen.ClientDisconnected, ""}},
	{"pause while reading", 2, chat(true, 2000, 2000, loadgen.ClientBehavior{ReadPause: writeIdle / 2}), []string{""}},
	{"stop reading", 1, chat(true, 4000, 4000, loadgen.ClientBehavior{ReadPause: 2 * writeIdle}), []string{"", loadgen.StreamTruncated}},
	{"slow upload", 3, large(loadgen.ClientBehavior{UploadTime: 2 * time.Second}), []string{""}},
	{"stalled upload", 1, large(loadgen.ClientBehavior{UploadTime: 15 * bodyIdle}), []string{"status 408", loadgen.NoConnection}},
	{"large bodies", 3, large(loadgen.ClientBehavior{}), []string{""}},
	{"prompts too long", 1, sized(1 << 20), []string{"status 400"}},
	{"bodies too large", 1, sized(bodyLimit + 1<<20), []string{"status 413", loadgen.NoConnection}},
	{"not JSON", 2, fixed("", `{"model":"sim","messages":[`), []string{"status 400"}},
	{"too deep", 1, fixed("", `{"model":"sim","messages":`+strings.Repeat("[", 100_000)), []string{"status 400"}},
	{"unknown models", 2, unknownModel, []string{"status 404"}},
	{"unknown paths", 2, fixed("/v1/../invocations", `{}`), []string{"status 404"}},
}

// draw takes a kind by weight.
func draw(from *rand.Rand) *kind {
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	at := from.IntN(total)
	i := slices.IndexFunc(kinds, func(k kind) bool { at -= k.weight; return at < 0 })
	return &kinds[i]
}

func turn(from *rand.Rand, bytes, least, most int) loadgen.Turn {
	return loadgen.Turn{
		Messages: []loadgen.Message{
			{Role: "system", Content: text(uint64(from.IntN(20)), 2000)},
			{Role: "user", Content: text(from.Uint64(), bytes)},
		},
		AnswerTokens: least + from.IntN(most-least+1),
	}
}

// text is of so many bytes, the same for the same seed.
func text(seed uint64, bytes int) string {
	word := strconv.FormatUint(seed, 36) + " "
	return strings.Repeat(word, bytes/len(word)+1)[:bytes]
}

func chat(streams bool, least, most int, m loadgen.ClientBehavior) func(*rand.Rand) loadgen.Request {
	return func(from *rand.Rand) loadgen.Request {
		model := models[from.IntN(len(models))]
		return loadgen.Request{Body: loadgen.ChatBody(model, turn(from, 50+from.IntN(2000), least, most), streams), Stream: streams, Behavior: m}
	}
}

// large is a prompt of 50 to 100 KB.
func large(m loadgen.ClientBehavior) func(*rand.Rand) loadgen.Request {
	return func(from *rand.Rand) loadgen.Request {
		return loadgen.Request{Body: loadgen.ChatBody("sim", turn(from, 50_000+from.IntN(50_000), 5, 10), false), Behavior: m}
	}
}

func sized(bytes int) func(*rand.Rand) loadgen.Request {
	return func(from *rand.Rand) loadgen.Request {
		return loadgen.Request{Body: loadgen.ChatBody("sim", turn(from, bytes, 5, 10), false)}
	}
}

func leaveEarly(from *rand.Rand) loadgen.Request {
	soon := time.Duration(1+from.IntN(20)) * time.Millisecond
	return chat(from.IntN(2) == 0, 50, 100, loadgen.ClientBehavior{DisconnectAfter: soon})(from)
}

func completion(from *rand.Rand) loadgen.Request {
	streams := from.IntN(2) == 0
	return body("/v1/completions", streams, map[string]any{
		"model": "sim", "prompt": text(from.Uint64(), 500), "max_tokens": 5 + from.IntN(30), "stream": streams,
	})
}

func embedding(from *rand.Rand) loadgen.Request {
	return body("/v1/embeddings", false, map[string]any{"model": "sim", "input": text(from.Uint64(), 500)})
}

// unknownModel is another one each time, so that whatever is kept of it grows.
func unknownModel(from *rand.Rand) loadgen.Request {
	return body("", false, map[string]any{"model": "m" + strconv.FormatUint(from.Uint64(), 36), "messages": []any{}})
}

func fixed(path, sent string) func(*rand.Rand) loadgen.Request {
	return func(*rand.Rand) loadgen.Request { return loadgen.Request{Path: path, Body: []byte(sent)} }
}

func body(path string, streams bool, fields map[string]any) loadgen.Request {
	b, err := json.Marshal(fields)
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return loadgen.Request{Path: path, Body: b, Stream: streams}
}
