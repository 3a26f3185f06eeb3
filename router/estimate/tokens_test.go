package estimate

import (
	"math"
	"testing"

	"warmroute/prompt"
)

func TestCountTokens(t *testing.T) {
	s := TokenSizes{BytesPerToken: 4, MediaTokens: [prompt.NumMediaKinds]float64{prompt.Image: 2000, prompt.Audio: 100, prompt.Video: 10_000}}
	const image, audio = 800, 800 + prompt.MediaBytes + 400 // where they begin
	media := []prompt.MediaPosition{
		{Offset: image, Kind: prompt.Image, Counts: prompt.MediaCounts{1}},
		{Offset: audio, Kind: prompt.Audio, Counts: prompt.MediaCounts{1, 1}},
	}
	for _, c := range []struct {
		name  string
		bytes int
		want  float64
	}{
		{"nothing", 0, 0},
		{"text before", 400, 100},
		{"up to the image", image, 200},
		{"half the image", image + prompt.MediaBytes/2, 200 + 1000},
		{"the image", image + prompt.MediaBytes, 200 + 2000},
		{"text between", audio, 200 + 2000 + 100},
		{"a quarter of the audio", audio + prompt.MediaBytes/4, 200 + 2000 + 100 + 25},
		{"text after", audio + prompt.MediaBytes + 800, 200 + 2000 + 100 + 100 + 200},
	} {
		if got := s.CountTokens(c.bytes, media); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %.1f tokens, want %.1f", c.name, got, c.want)
		}
	}
	if got := s.CountTokens(800, nil); got != 200 {
		t.Errorf("text alone: %.1f tokens, want 200", got)
	}
}

func TestMediaTokens(t *testing.T) {
	image, audio := prompt.MediaCounts{1}, prompt.MediaCounts{0, 1}
	for _, c := range []struct {
		name        string
		counts      prompt.MediaCounts
		text        int // bytes
		knownRatio  bool
		tokens      int // of the prompt
		samples     int
		kind        prompt.MediaKind
		least, most float64
	}{
		{"large image", image, 400, true, 100 + 8000, 50, prompt.Image, 7000, 8000},
		{"ratio not known", image, 400, false, 100 + 8000, 50, prompt.Image, 7000, 8000},
		{"small image", image, 400, true, 100 + 64, 50, prompt.Image, 64, 100},
		{"several images", prompt.MediaCounts{4}, 400, true, 100 + 4*3000, 50, prompt.Image, 2900, 3000},
		{"audio", audio, 400, true, 100 + 300, 50, prompt.Audio, 300, 330},
		{"other kind stays", audio, 400, true, 100 + 300, 50, prompt.Image, 1000, 1000},
		{"two kinds", prompt.MediaCounts{1, 1}, 400, true, 100 + 8000, 50, prompt.Image, 1000, 1000},
		{"much text", image, 400_000, true, 100_000 + 3000, 50, prompt.Image, 1000, 1000},
		{"some text of a ratio not known", image, 40_000, false, 10_000 + 3000, 50, prompt.Image, 1000, 1000},
		{"some text of a known ratio", image, 40_000, true, 10_000 + 3000, 50, prompt.Image, 2800, 3000},
		{"fewer tokens than the text has", image, 4000, true, 500, 50, prompt.Image, 1000, 1000},
		{"impossible number", image, 400, true, 1 << 30, 50, prompt.Image, 1000, 1000},
		{"one wrong number", image, 400, true, 100_000, 1, prompt.Image, 1000, 4500},
	} {
		f := New(256, 1)
		f.Grow(1)
		send := func(p Prediction, tokens int) {
			f.LearnFromCompletion(0, &p, Usage{PromptTokens: tokens}, CacheInfo{Alignment: 1})
		}
		if c.knownRatio {
			send(Prediction{Model: "m", Bytes: 40_000, IsText: true}, 10_000)
		}
		items := 0
		for _, n := range c.counts {
			items += int(n)
		}
		for range c.samples {
			send(Prediction{Model: "m", Bytes: c.text + items*prompt.MediaBytes, Media: c.counts}, c.tokens)
		}
		s := f.TokenSizes("m", 0)
		if got := s.MediaTokens[c.kind]; got < c.least || got > c.most {
			t.Errorf("%s: %.0f tokens, want %.0f to %.0f", c.name, got, c.least, c.most)
		}
		if s.BytesPerToken != 4 {
			t.Errorf("%s: %.2f bytes per token, want 4 as before", c.name, s.BytesPerToken)
		}
		if another := f.TokenSizes("another", 0); another != s {
			t.Errorf("%s: %v for another model, want the mean of all, %v", c.name, another, s)
		}
		if got, want := f.KnowsMediaTokens("m", &c.counts), c.least != 1000; c.name != "other kind stays" && got != want {
			t.Errorf("%s: known is %v, want %v", c.name, got, want)
		}
	}
	f := New(256, 1)
	f.Grow(1)
	f.SetLearningDisabled(true)
	f.LearnFromCompletion(0, &Prediction{Bytes: 4400, Media: image}, Usage{PromptTokens: 8100}, CacheInfo{Alignment: 1})
	if got := f.TokenSizes("", 0).MediaTokens[prompt.Image]; got != defaultMediaTokens {
		t.Errorf("%.0f tokens were learned though learning is disabled", got)
	}
}

func TestMediaTokensWithTextClass(t *testing.T) {
	const class, bytes, textTokens, imageTokens = prompt.TextClass(3), 20_000, 10_000, 3000
	image := prompt.MediaCounts{1}
	f := newTestEstimates(1)
	send := func(p Prediction, tokens int) {
		f.LearnFromCompletion(0, &p, Usage{PromptTokens: tokens}, CacheInfo{Alignment: 1})
	}
	send(Prediction{Model: "m", TextClass: class, Bytes: 10 * bytes, IsText: true}, 10*textTokens)
	for range 50 {
		for _, model := range []string{"m", "another"} {
			send(Prediction{Model: model, TextClass: class, Bytes: bytes + prompt.MediaBytes, Media: image}, textTokens+imageTokens)
		}
	}
	if got := f.TokenSizes("m", class).MediaTokens[prompt.Image]; math.Abs(got-imageTokens) > 0.2*imageTokens {
		t.Errorf("%.0f tokens, want about %d", got, imageTokens)
	}
	if f.KnowsMediaTokens("another", &image) {
		t.Error("media tokens of a model are known though the bytes per token of its text are not")
	}
}
