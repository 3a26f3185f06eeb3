package main

import (
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/loadgen"
	"warmroute/replay"
)

// benchTally is what was seen of one target. Safe for concurrent use, but for elapsed.
type benchTally struct {
	replay.Tally
	elapsed time.Duration // measured time so far

	mu   sync.Mutex
	said map[string]string // by cause of failure: the first error code that came with it
}

func (b *benchTally) add(r replay.Result) {
	b.Tally.Add(r)
	if r.Err == "" {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.said == nil {
		b.said = map[string]string{}
	}
	if b.said[r.Err] == "" {
		b.said[r.Err] = errorCode(r.Detail)
	}
}

// errorCode finds the code or the type in an OpenAI error. Its message is not
// for printing: servers quote prompts and keys in it.
func errorCode(detail string) string {
	for _, path := range []string{"error.code", "error.type", "code", "type"} { // the last two: vLLM's, until 0.10
		if word := gjson.Get(detail, path).Str; isPlainWord(word) {
			return word
		}
	}
	return ""
}

// adviseOn says what to do about a cause of failure.
func adviseOn(cause string, o *benchOptions) string {
	switch {
	case cause == loadgen.NoConnection:
		return "refused, or closed before an answer began: is it still running?"
	case cause == loadgen.Timeout:
		return "no whole answer within --timeout; raise it, or lower --sessions"
	case cause == "status 401", cause == "status 403":
		return "it does not accept the key: --api-key-file or --api-key-env"
	case cause == "status 404":
		return "it has no such model, or no /v1/chat/completions: --model"
	case cause == "status 400" && !o.plain:
		return "it may not know ignore_eos (--plain), or the chats outgrow the model's context (--turns, --system-tokens)"
	case cause == "status 400", cause == "status 413":
		return "the chats may outgrow what it takes: lower --turns or --system-tokens"
	case cause == "status 429", cause == "status 503":
		return "it has more to do than it takes: lower --sessions; its Retry-After was kept, up to 30 s"
	case strings.HasPrefix(cause, "status 5"):
		return "it failed; its log says why"
	case cause == loadgen.NotStream:
		return "it does not stream; is something between that buffers or answers itself?"
	case cause == loadgen.StreamTruncated, cause == loadgen.StreamError, cause == loadgen.ResponseAborted:
		return "a replica ended in mid-answer, or something between closes long answers"
	case cause == loadgen.TooLong:
		return "an event above 1 MiB or a text above 4 MiB was given up"
	case cause == loadgen.NoContent:
		return "a stream came with nothing in it"
	}
	return "see its log"
}

// isPlainWord reports whether s is an identifier of a length that a table bears.
func isPlainWord(s string) bool {
	return s != "" && len(s) <= 40 && !strings.ContainsFunc(s, func(r rune) bool { return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || r == '_') })
}
