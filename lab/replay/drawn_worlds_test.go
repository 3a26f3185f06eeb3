//go:build worlds

package replay

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
)

var (
	drawnWorlds = flag.Int("worlds", 0, "number of worlds of each seed that TestDrawnWorlds and TestArrivalWorlds play")
	drawnSeeds  = flag.String("worldseeds", "7", "seeds of these worlds, separated by commas")
	drawnFirst  = flag.Int("first", 0, "number of the first world")
	drawnRivals = flag.String("rivals", "",
		"take the figures of the other policies from this file as far as it has them, and write the further ones to it: they change with the "+
			"engine and the worlds only; none is played with our queue then")
	drawnResults = flag.String("results", "", "write the figures of each world to this file, a JSON object per line")
)

// TestDrawnWorlds plays worlds and compares prefix with the other policies, by the bounds in worldBounds:
//
//	go test -tags worlds ./lab/replay -run TestDrawnWorlds -v -timeout 0 -worlds 80 -worldseeds 7,8 -rivals FILE
func TestDrawnWorlds(t *testing.T) {
	draw := func(seed uint64, number int) (World, error) { return DrawWorld(seed, number, nil) }
	if results := playDrawnWorlds(t, "", draw); results != nil {
		judgeWorlds(t, worldBounds(results))
	}
}

// TestArrivalWorlds plays worlds that differ in how requests arrive:
//
//	go test -tags worlds ./lab/replay -run TestArrivalWorlds -v -timeout 0 -worlds 80 -rivals FILE
func TestArrivalWorlds(t *testing.T) {
	if results := playDrawnWorlds(t, "arrivals ", DrawArrivalWorld); results != nil {
		judgeWorlds(t, arrivalBounds(results))
	}
}

// playDrawnWorlds plays the worlds of the flags, and prints the report. family distinguishes them in the file of -rivals.
func playDrawnWorlds(t *testing.T, family string, draw func(seed uint64, number int) (World, error)) []WorldResult {
	known, err := readKnownRivals(*drawnRivals)
	if err != nil {
		t.Fatalf("-rivals: %v", err)
	}
	var results []WorldResult
	for text := range strings.SplitSeq(*drawnSeeds, ",") {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("-worldseeds: %v", err)
		}
		for i := range *drawnWorlds {
			number := *drawnFirst + i
			w, err := draw(seed, number)
			if err != nil {
				t.Fatal(err)
			}
			r, err := w.playAgainst(t, known, fmt.Sprintf("%s%d/%d", family, seed, number))
			if err != nil {
				t.Fatal(w, err)
			}
			r.Number += int(seed) * 1000 // in the report, world 7012 is number 12 of seed 7
			results = append(results, r)
		}
	}
	if len(results) == 0 {
		return nil
	}
	if err := writeResults(*drawnResults, results); err != nil {
		t.Fatalf("-results: %v", err)
	}
	if err := WriteWorldReport(os.Stdout, results); err != nil {
		t.Fatal(err)
	}
	return results
}

// knownRivals has the figures of the other policies without our queue, by family, seed and number of the world.
type knownRivals map[string][]Summary

func readKnownRivals(path string) (knownRivals, error) {
	known := knownRivals{}
	data, err := os.ReadFile(path)
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		return known, nil
	}
	if err != nil {
		return nil, err
	}
	return known, json.Unmarshal(data, &known)
}

// playAgainst plays a world under prefix, and under the others unless they are known by the world's key; then they are, and
// are written to the file of -rivals.
func (w World) playAgainst(t *testing.T, known knownRivals, key string) (WorldResult, error) {
	if *drawnRivals == "" {
		return w.Run(t.Context())
	}
	r, err := w.RunOwn(t.Context())
	if err != nil {
		return r, err
	}
	own := len(r.Results)
	if rivals, ok := known[key]; ok {
		r.Results = append(r.Results, rivals...)
		return r, nil
	}
	if err := w.addRivals(t.Context(), &r); err != nil {
		return r, err
	}
	known[key] = r.Results[own:]
	data, err := json.Marshal(known)
	if err != nil {
		return r, err
	}
	return r, os.WriteFile(*drawnRivals, data, 0o644)
}

func writeResults(path string, results []WorldResult) error {
	if path == "" {
		return nil
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := json.NewEncoder(file)
	for _, r := range results {
		if err := lines.Encode(r); err != nil {
			return err
		}
	}
	return file.Close()
}

// worldBound is a figure over all worlds and what it must be at most.
type worldBound struct {
	what  string
	value float64
	must  float64
}

// againstBest returns the ratios of a figure of prefix to that of the best other policy in each world.
func againstBest(figure string, results []WorldResult) []WorldRatio {
	return figureRatios(&comparisons[0], figure, results)
}

func figureRatios(c *comparison, figure string, results []WorldResult) []WorldRatio {
	k := slices.IndexFunc(worldFigures, func(f worldFigure) bool { return f.name == figure })
	return ratiosOf(c, &worldFigures[k], results)
}

func worstOf(ratios []WorldRatio) float64 { return ratios[len(ratios)-1].Ratio }

// worldBounds returns the figures that judge prefix over the worlds of DrawWorld.
func worldBounds(results []WorldResult) []worldBound {
	best := func(name string) []WorldRatio { return againstBest(name, results) }
	queue := func(name string) []WorldRatio { return figureRatios(&comparisons[3], name, results) }
	bounds := []worldBound{
		{"best in hindsight, E2E", geometricMean(best("E2E mean")), 0.98},
		{"best in hindsight, TTFT", geometricMean(best("TTFT mean")), 1},
		{"best in hindsight, longest tenth", geometricMean(best("TTFT of the longest tenth")), 1.08},
		{"best in hindsight, E2E, share above 1.05", shareOf(best("E2E mean"), above(1.05)), 0.08},
		{"best in hindsight, E2E, worst", worstOf(best("E2E mean")), 1.12},
		{"queue / without, E2E, share above 1.01", shareOf(queue("E2E mean"), above(1.01)), 0.03},
		{"queue / without, E2E, worst", worstOf(queue("E2E mean")), 1.04},
		{"queue / without, TTFT p99, share above 1.02", shareOf(queue("TTFT p99"), above(1.02)), 0.1},
		{"queue / without, E2E p99, share above 1.02", shareOf(queue("E2E p99"), above(1.02)), 0.1},
	}
	fixed := worldBound{what: "each policy as a fixed choice, E2E", must: 0.93}
	fixedTTFT := worldBound{what: "each policy as a fixed choice, TTFT", must: 0.9}
	for _, c := range compareFixedChoices(ownRule, results) {
		fixed.value, fixedTTFT.value = max(fixed.value, c.means[0]), max(fixedTTFT.value, c.means[1])
	}
	return append(bounds, fixed, fixedTTFT, lostBound(results))
}

// arrivalBounds returns the figures that judge prefix over the worlds of DrawArrivalWorld.
func arrivalBounds(results []WorldResult) []worldBound {
	e2e := againstBest("E2E mean", results)
	return []worldBound{
		{"best in hindsight, E2E", geometricMean(e2e), 0.92},
		{"best in hindsight, E2E, worst", worstOf(e2e), 1.1},
		lostBound(results),
	}
}

func lostBound(results []WorldResult) worldBound {
	lost := worldBound{what: "worlds with lost requests"}
	for i := range results {
		if results[i].lostMore() > 0 {
			lost.value++
		}
	}
	return lost
}

// judgeWorlds prints the figures with their bounds, and fails the test for each above its own.
func judgeWorlds(t *testing.T, bounds []worldBound) {
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out)
	for _, b := range bounds {
		verdict := "pass"
		switch {
		case math.IsNaN(b.value):
			verdict = "-" // no world has the figure
		case b.value > b.must:
			verdict = "FAIL"
			t.Errorf("%s: %.3f is above %g", b.what, b.value, b.must)
		}
		fmt.Fprintf(out, "%s\t%.3f\t≤ %g\t%s\n", b.what, b.value, b.must, verdict)
	}
	out.Flush()
}
