package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"warmroute/lab/replay"
)

// figures are made up: policies ever worse from the first to the last.
func figures(policies []string, load float64) replay.Report {
	r := replay.Report{Trace: "conversation.jsonl", Backends: 8, Load: load, Seeds: 5}
	for i, name := range policies {
		worse := 1 + float64(i)/4*load*load
		r.Results = append(r.Results, replay.Summary{
			Policy: name, Requests: 12031, HitRatio: 0.35 / worse,
			TTFTP50: 0.5 * worse, TTFTMean: 1.2 * worse, TTFTP90: 3.1 * worse, TTFTP99: 11 * worse,
			WorkMaxOverMean: 1 + 0.02*worse*worse, InFlightMaxOverMean: 1 + 0.05*worse*worse,
		})
	}
	return r
}

func manyPolicies() []string {
	return []string{
		"pooled", "prefix", "smetric", "lmetric", "llmd-guide", "cache-threshold-old", "weighted", "dynamo",
		"cache-threshold", "smg", "preble", "aibrix", "ray", "chwbl", "hashtrie", "simhash", "session",
		"least-load", "power-of-two", "round-robin", "random",
	}
}

// texts returns the text elements of a well-formed SVG.
func texts(t *testing.T, svg []byte) map[string]int {
	t.Helper()
	found := map[string]int{}
	d := xml.NewDecoder(bytes.NewReader(svg))
	inText := false
	for {
		token, err := d.Token()
		switch {
		case errors.Is(err, io.EOF):
			return found
		case err != nil:
			t.Fatalf("%v in %s", err, svg)
		}
		switch token := token.(type) {
		case xml.StartElement:
			inText = token.Name.Local == "text"
		case xml.CharData:
			if inText {
				found[strings.TrimSpace(string(token))]++
			}
		case xml.EndElement:
			inText = false
		}
	}
}

func TestEveryPolicyIsNamedOnce(t *testing.T) {
	f := func(policies []string, loads ...float64) {
		t.Helper()
		var reports []replay.Report
		for _, load := range loads {
			reports = append(reports, figures(policies, load))
		}
		var svg bytes.Buffer
		if err := WriteSVG(&svg, reports); err != nil {
			t.Fatal(err)
		}
		found := texts(t, svg.Bytes())
		for _, name := range policies {
			if found[name] != 1 {
				t.Errorf("%s stands %d times in the picture of %d policies and %d loads", name, found[name], len(policies), len(loads))
			}
		}
	}
	f([]string{"prefix"}, 0.9)
	f(manyPolicies(), 0.9)
	f([]string{"prefix"}, 0.7, 0.9)
	f(manyPolicies(), 0.7, 0.9, 1.1)
}

func TestEqualFigures(t *testing.T) {
	f := func(reports ...replay.Report) {
		t.Helper()
		var svg bytes.Buffer
		if err := WriteSVG(&svg, reports); err != nil {
			t.Fatal(err)
		}
		texts(t, svg.Bytes())
		if out := svg.String(); strings.Contains(out, "NaN") || strings.Contains(out, "Inf") {
			t.Errorf("a coordinate that is not a number: %s", out)
		}
	}
	nothing := replay.Summary{Policy: "prefix"}
	alike := replay.Summary{Policy: "prefix", Requests: 1, HitRatio: 1, TTFTMean: 1, TTFTP50: 1, TTFTP90: 1, TTFTP99: 1, WorkMaxOverMean: 1,
		InFlightMaxOverMean: 1}
	for _, s := range []replay.Summary{nothing, alike} {
		f(replay.Report{Results: []replay.Summary{s}})
		f(replay.Report{Load: 1, Results: []replay.Summary{s}}, replay.Report{Load: 1, Results: []replay.Summary{s}})
	}
	if err := WriteSVG(io.Discard, nil); err == nil {
		t.Error("a picture of nothing")
	}
}

func TestPolicyWithoutCompletedRequests(t *testing.T) {
	f := func(loads ...float64) {
		t.Helper()
		var reports []replay.Report
		for _, load := range loads {
			r := figures([]string{"prefix", "random"}, load)
			r.Results[1].Lost = 5
			r.Results = append(r.Results, replay.Summary{Policy: "chwbl", Lost: 12031})
			reports = append(reports, r)
		}
		var svg bytes.Buffer
		if err := WriteSVG(&svg, reports); err != nil {
			t.Fatal(err)
		}
		found := texts(t, svg.Bytes())
		if want := fmt.Sprintf("random (%d lost)", 5*len(loads)); found[want] != 1 || found["prefix"] != 1 || found["chwbl"] != 0 {
			t.Errorf("the picture has no %q, or chwbl among those with figures: %v", want, found)
		}
		if !strings.Contains(svg.String(), "no request completed: chwbl<") {
			t.Errorf("nothing says what became of chwbl: %v", found)
		}
	}
	f(0.9)
	f(0.7, 0.9)
}

func orderOf(reports ...replay.Report) []series {
	_, order, _ := rankPolicies(reports)
	return order
}

func TestWorstOfManyLinesAreGrey(t *testing.T) {
	reports := []replay.Report{figures(manyPolicies(), 0.7), figures(manyPolicies(), 0.9)}
	var colored []string
	colors := map[string]bool{}
	for _, s := range orderOf(reports...) {
		if !s.grey {
			colored = append(colored, s.policy)
			colors[s.line.color] = true
		}
	}
	if !slices.Equal(colored, manyPolicies()[:8]) || len(colors) != 8 {
		t.Errorf("%v have a line of their own, in %d colours; want prefix, pooled and the six best", colored, len(colors))
	}
	for _, s := range orderOf(figures(manyPolicies()[8:16], 0.9)) {
		if s.grey {
			t.Errorf("%s of eight is grey", s.policy)
		}
	}
}

func TestLogTicks(t *testing.T) {
	f := func(low, high float64, want string) {
		t.Helper()
		var labels []string
		for _, tick := range logTicks(low, high) {
			labels = append(labels, tick.label)
		}
		if got := strings.Join(labels, " "); got != want {
			t.Errorf("%g to %g: ticks %s, want %s", low, high, got, want)
		}
	}
	f(0.4, 13, "0.5 1 2 5 10")
	f(0.9, 3.4, "1 2 1.5 3 1.2")
	f(0.08, 1200, "0.1 1 10 100 1000")
}
