package router

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/prompt"
)

const imageTokens = 5000 // of the images of these tests

// askChat makes a request for a chat whose system prompt has 5,000 tokens and whose user sends
// these content parts. It returns its true number of tokens.
func askChat(t *testing.T, fleet []*backends.Backend, parts ...string) (req *Request, tokens int) {
	t.Helper()
	body := fmt.Sprintf(`{"messages":[{"role":"system","content":%q},{"role":"user","content":[%s]}]}`, strings.Repeat("word", 5000),
		strings.Join(parts, ","))
	p := new(prompt.Prompt)
	if err := p.Parse(prompt.Chat, []byte(body)); err != nil {
		t.Fatal(err)
	}
	p.ApplyLayout(prompt.DefaultLayout)
	media := p.AppendMediaPositions(nil)
	return &Request{
		Backends: fleet, Blocks: p.AppendBlocks(nil, "m", 256), Bytes: len(p.Text), Sequences: 1, Streams: true, Media: p.HasMedia(),
		MediaItems: media,
	}, (len(p.Text)-len(media)*prompt.MediaBytes)/4 + len(media)*imageTokens
}

func imageURL(name string) string {
	return fmt.Sprintf(`{"type":"image_url","image_url":{"url":"http://images/%s"}}`, name)
}

func TestMediaTokensFromUsage(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	sized(r, fleet, c, 400_000)
	off := func(got, want int) float64 { return math.Abs(float64(got-want)) / float64(want) }

	req, tokens := askChat(t, fleet, imageURL("first"))
	d := mustPick(t, r, req)
	before := off(d.PromptTokens, tokens)
	d.Release(usage(tokens, 0))
	for n := range 20 {
		req, tokens := askChat(t, fleet, imageURL(fmt.Sprint(n)))
		d := mustPick(t, r, req)
		now := off(d.PromptTokens, tokens)
		if now > before {
			t.Fatalf("response %d: estimate of the prompt is off by %.2f, more than %.2f before", n, now, before)
		}
		before = now
		d.Release(usage(tokens, 0))
	}
	if before > 0.05 {
		t.Errorf("estimate of the prompt is off by %.2f", before)
	}

	// The text is cached, the image is not: its tokens are what is computed.
	req, _ = askChat(t, fleet, imageURL("another"))
	d = mustPick(t, r, req)
	if got := d.entry.Prediction.Uncached; math.Abs(got-imageTokens) > 0.1*imageTokens {
		t.Errorf("%.0f uncached tokens, want about %d", got, imageTokens)
	}
	if got := ownKVTokens(r, d.Backend.Slot, c.now); math.Abs(got-5000-imageTokens) > 0.1*imageTokens {
		t.Errorf("%.0f tokens of the cache in use, want about %d", got, 5000+imageTokens)
	}
	// A second request with the image shares it.
	other := mustPick(t, r, req)
	if got := ownKVTokens(r, d.Backend.Slot, c.now); other.Backend != d.Backend || math.Abs(got-5000-imageTokens) > 0.1*imageTokens {
		t.Errorf("%.0f tokens of the cache in use by two requests with one image, want about %d", got, 5000+imageTokens)
	}
	d.Release(Outcome{End: Completed})
	other.Release(Outcome{End: Completed})
	if got := ownKVTokens(r, d.Backend.Slot, c.now); got != 0 {
		t.Errorf("%.0f tokens are in use after the end", got)
	}
}

func TestMediaUUIDMatches(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	first, tokens := askChat(t, fleet, `{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"},"uuid":"u"}`, `"What is this?"`)
	d := mustPick(t, r, first)
	d.Release(usage(tokens, 0))
	again, _ := askChat(t, fleet, `{"type":"image_url","image_url":null,"uuid":"u"}`, `"What is this? And why?"`)
	if next := mustPick(t, r, again); next.Backend != d.Backend || next.MatchedBlocks < d.TotalBlocks {
		t.Errorf("%d of %d blocks matched on %s, want %d on %s", next.MatchedBlocks, next.TotalBlocks, next.Backend.Name, d.TotalBlocks,
			d.Backend.Name)
	}
	another, _ := askChat(t, fleet, `{"type":"image_url","image_url":null,"uuid":"v"}`, `"What is this?"`)
	if next := mustPick(t, r, another); next.MatchedBlocks >= d.TotalBlocks-prompt.MediaBytes/256+1 {
		t.Errorf("%d of %d blocks matched with another image", next.MatchedBlocks, next.TotalBlocks)
	}
}

// Media whose tokens are not known do not make a prompt too long.
func TestMediaCountInPromptLimit(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	images := make([]string, 8)
	for i := range images {
		images[i] = imageURL(fmt.Sprint(i))
	}
	for _, want := range []bool{false, true} {
		req, tokens := askChat(t, fleet, images...) // 45,000 tokens
		req.ContextLengths = contextLengths(8000)
		d := mustPick(t, r, req)
		if d.entry.Prediction.IsTooLong != want {
			t.Errorf("too long is %v, want %v", d.entry.Prediction.IsTooLong, want)
		}
		d.Release(Outcome{End: NotProcessed})
		req.ContextLengths = backends.ContextLengths{}
		for range 10 { // known from eight responses on
			mustPick(t, r, req).Release(usage(tokens, 0))
		}
	}
	req, _ := askChat(t, fleet, images...)
	req.ContextLengths, req.Blocks = contextLengths(8000), nil
	if d := mustPick(t, r, req); d.entry.Prediction.IsTooLong {
		t.Error("a truncated prompt is too long")
	}
}
