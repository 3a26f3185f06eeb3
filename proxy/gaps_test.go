package proxy

import (
	"io"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A gap lies between two chunks with events: neither the first one, nor a comment,
// nor the mark of the end makes one.
func TestGapsBetweenChunksAreMeasured(t *testing.T) {
	const pause = 30 * time.Millisecond
	next := make(chan struct{})
	f := keepingAlive(t, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role+hello))
		for range 2 {
			s.until(next)
			time.Sleep(pause)
			s.say(chunk(world))
		}
		s.until(next)
		s.say(chunk(": a comment\n\n"))
		s.until(next)
		s.say(chunk(doneLine), lastChunk)
	}})
	r := f.open(t, "/v1/chat/completions", askStream)
	for _, line := range []string{strings.TrimSpace(hello), strings.TrimSpace(world), strings.TrimSpace(world), ": a comment"} {
		r.to(line)
		next <- struct{}{}
	}
	if _, err := io.Copy(io.Discard, r.br); err != nil {
		t.Fatal(err)
	}
	f.counts(`warmroute_itl_seconds_count{backend="r0",model="m"} 2`)
	_, rest, _ := strings.Cut(f.exposition(), "\n"+`warmroute_itl_seconds_sum{backend="r0",model="m"} `)
	line, _, _ := strings.Cut(rest, "\n")
	if sum, err := strconv.ParseFloat(line, 64); err != nil || sum < 2*pause.Seconds() {
		t.Errorf("the gaps have %q seconds together, two pauses have %v", line, 2*pause)
	}
}

func TestAnAnswerThatIsNoStreamHasNoGaps(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}]}`)
	f.counts(`warmroute_itl_seconds_count{backend="r0",model="m"} 0`)
}
