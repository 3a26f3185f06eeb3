package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"warmroute/cli"
	"warmroute/lab/replay"
)

const maxWorlds = 10_000

// validateWorlds returns an error for flags that --worlds does not allow: it draws nearly
// everything itself.
func (o *replayOptions) validateWorlds(flags *pflag.FlagSet) error {
	if o.worlds < 1 || o.worlds > maxWorlds {
		return fmt.Errorf("--worlds %d is not between 1 and %d", o.worlds, maxWorlds)
	}
	var err error
	flags.Visit(func(f *pflag.Flag) {
		switch f.Name {
		case "worlds", "seed", "trace", "json":
		default:
			err = fmt.Errorf("--worlds draws what --%s sets: remove one of them", f.Name)
		}
	})
	return err
}

// runWorlds plays drawn worlds and prints how prefix compares with the other policies.
func (o *replayOptions) runWorlds(ctx context.Context, stdout, stderr io.Writer) error {
	var trace *replay.Trace
	if o.trace != "" {
		t, err := readTrace(o.trace)
		if err != nil {
			return cli.UsageError{Err: fmt.Errorf("--trace: %w", err)}
		}
		trace = t
	}
	bar := newProgressBar(stderr, "replay")
	defer bar.clear()
	lines := json.NewEncoder(stdout)
	var results []replay.WorldResult
	for number := range o.worlds {
		bar.set(float64(number) / float64(o.worlds))
		w, err := replay.DrawWorld(o.seed, number, trace)
		if err != nil {
			return err
		}
		result, err := w.Run(ctx)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("interrupted after %d of %d worlds", number, o.worlds)
		case err != nil:
			return fmt.Errorf("%v: %w", w, err)
		}
		if o.json {
			if err := lines.Encode(result); err != nil {
				return err
			}
			continue
		}
		results = append(results, result)
	}
	if o.json {
		return nil
	}
	bar.clear()
	return replay.WriteWorldReport(stdout, results)
}
