package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"warmroute/config"
	"warmroute/replay"
)

func workloadNames() []string { return []string{"agentic", "hot", "chats", "documents"} }

// replayWorkload is what the flags ask to be played.
type replayWorkload struct {
	name string
	load float64                            // that it has where no flag says; 0 in a closed loop, which has none
	at   func(load float64) replay.Workload // 0: the one that it has
}

// checkWorkload finds what the flags say twice, or say to no workload.
func (o *replayOptions) checkWorkload() error {
	switch {
	case (o.trace == "") == (o.workload == ""):
		return fmt.Errorf("name one of --trace FILE and --workload %s", strings.Join(workloadNames(), "|"))
	case o.workload != "" && !slices.Contains(workloadNames(), o.workload):
		return fmt.Errorf("--workload %s: there is none of that name; choose of %s", o.workload, strings.Join(workloadNames(), ", "))
	case o.sessions != 0 && o.workload != "agentic":
		return fmt.Errorf("--sessions is for --workload agentic alone")
	case (o.prompts != 0 || o.rate != 0) && o.workload != "hot":
		return fmt.Errorf("--prompts and --rate are for --workload hot alone")
	case len(o.loads) > 0 && o.workload == "agentic":
		return fmt.Errorf("--load: agentic sessions wait for their answers, so they have no load to set; use --sessions")
	case len(o.loads) > 0 && o.rate != 0:
		return fmt.Errorf("--rate and --load say the same thing; name one")
	case o.sessions < 0 || o.sessions > 10_000:
		return fmt.Errorf("--sessions %d is not between 1 and 10,000", o.sessions)
	case o.prompts < 0 || o.prompts > 100_000:
		return fmt.Errorf("--prompts %d is not between 1 and 100,000", o.prompts)
	case !(o.rate >= 0 && o.rate <= 10_000):
		return fmt.Errorf("--rate %g is not between 0 and 10,000 requests a second", o.rate)
	}
	return nil
}

// open reads the trace or describes the workload.
func (o *replayOptions) open() (*replayWorkload, error) {
	switch o.workload {
	case "agentic":
		agentic := replay.Agentic{Concurrency: cmp.Or(o.sessions, 48)}
		return &replayWorkload{
			name: fmt.Sprintf("agentic-%d", agentic.Concurrency),
			at:   func(float64) replay.Workload { return agentic },
		}, nil
	case "hot":
		hot := replay.Hot(cmp.Or(o.prompts, 1), cmp.Or(o.rate, 20))
		return sharedPrompts(fmt.Sprintf("hot-%d", hot.Prompts), hot, o.backends), nil
	case "chats":
		chats := replay.OpenChats()
		return sharedPrompts("chats", chats, o.backends), nil
	case "documents":
		const documentsLoad = 1.5
		return &replayWorkload{
			name: "documents", load: documentsLoad,
			at: func(load float64) replay.Workload { return replay.Documents{Load: cmp.Or(load, documentsLoad)} },
		}, nil
	}
	trace, err := readTrace(o.trace)
	if err != nil {
		return nil, err
	}
	return &replayWorkload{
		name: filepath.Base(o.trace), load: trace.Load(o.backends),
		at: func(load float64) replay.Workload { return replay.Traced{Trace: trace, Load: load} },
	}, nil
}

func sharedPrompts(name string, w replay.SharedPrompts, backends int) *replayWorkload {
	return &replayWorkload{name: name, load: w.LoadOn(backends), at: func(load float64) replay.Workload {
		w := w
		if load > 0 {
			w.Rate, w.Load = 0, load
		}
		return w
	}}
}

func readTrace(path string) (*replay.Trace, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, usageError{config.ReadError("--trace", path, err)}
	}
	defer file.Close()
	trace, err := replay.ParseTrace(file)
	if err != nil {
		return nil, usageError{fmt.Errorf("--trace %s: %w", path, err)}
	}
	return trace, nil
}
