package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// pauseState is whether the engines take steps. Server.engineMu guards it.
type pauseState struct {
	paused          bool // by /pause
	admissionPaused bool // in mode wait, before and after the requests in flight have ended
	level           int  // of the last sleep

	// asleep are the tags of what has to wake up before the engines go on; none: awake.
	asleep []string
}

func (p *pauseState) stopsEngines() bool { return p.paused || len(p.asleep) > 0 }

// isPaused is what vLLM reports, also of an engine that is asleep.
func (p *pauseState) isPaused() bool { return p.stopsEngines() || p.admissionPaused }

// pauseModes are what /pause and /sleep do with requests in flight, the default first: abort
// them, wait for their ends, or keep them until the engines go on. Requests that arrive meanwhile wait.
var pauseModes = []string{"abort", "wait", "keep"}

// readPauseMode returns the mode of a request to /pause or /sleep.
func readPauseMode(r *http.Request) (mode string, err error) {
	query := r.URL.Query()
	if !query.Has("mode") {
		return pauseModes[0], nil
	}
	if mode = query.Get("mode"); !slices.Contains(pauseModes, mode) {
		return "", badRequest("query.mode", "Input should be 'abort', 'wait' or 'keep'")
	}
	return mode, nil
}

// stopEngines lets change set pauseState, after what mode does with the requests in flight. With clearCache
// it empties the KV caches, also of requests that are kept. In mode wait it blocks until no request is running,
// and changes nothing if the engines are restarted or ctx is done before.
func (s *Server) stopEngines(ctx context.Context, mode string, clearCache bool, change func(*pauseState)) error {
	switch mode {
	case "abort":
		s.AbortAll()
	case "wait":
		s.pauseAdmission()
		for s.hasStartedRequests() {
			select {
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if mode == "wait" && !s.pause.admissionPaused {
		return nil
	}
	change(&s.pause)
	if clearCache {
		for _, k := range s.ranks {
			k.engine.DiscardCache(time.Since(s.startedAt))
		}
	}
	return nil
}

func (s *Server) pauseAdmission() {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	s.pause.admissionPaused = true
	for _, k := range s.ranks {
		k.engine.PauseAdmission(true)
	}
}

// hasStartedRequests reports whether a request that has not ended does not wait for its admission.
func (s *Server) hasStartedRequests() bool {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return slices.ContainsFunc(s.ranks, func(k *rank) bool {
		st := k.engine.Stats()
		return len(k.live) > st.Arriving+st.Waiting
	})
}

// restartEngines lets change set pauseState, and wakes the engines unless it still stops them.
func (s *Server) restartEngines(change func(*pauseState)) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	change(&s.pause)
	if s.pause.stopsEngines() {
		return
	}
	s.pause.admissionPaused = false
	for _, k := range s.ranks {
		k.engine.PauseAdmission(false)
		k.wakeEngine()
	}
}

// pauseState returns a copy of the state.
func (s *Server) pauseState() pauseState {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.pause
}

func (s *Server) postPause(w http.ResponseWriter, r *http.Request) {
	mode, err := readPauseMode(r)
	if err == nil {
		clearCache := !strings.EqualFold(r.URL.Query().Get("clear_cache"), "false")
		err = s.stopEngines(r.Context(), mode, clearCache, func(p *pauseState) { p.paused = true })
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, `{"status":"paused"}`)
}

func (s *Server) postResume(w http.ResponseWriter, _ *http.Request) {
	s.restartEngines(func(p *pauseState) { p.paused = false })
	writeJSON(w, http.StatusOK, `{"status":"resumed"}`)
}

func (s *Server) getPaused(w http.ResponseWriter, _ *http.Request) {
	state := s.pauseState()
	writeJSON(w, http.StatusOK, `{"is_paused":`+strconv.FormatBool(state.isPaused())+`}`)
}

// postSleep stops the engines. Level 0 keeps everything in memory, 1 and 2 lose the KV cache.
func (s *Server) postSleep(w http.ResponseWriter, r *http.Request) {
	level := 1
	mode, err := readPauseMode(r)
	if text := r.URL.Query().Get("level"); err == nil && text != "" {
		if level, err = strconv.Atoi(text); err != nil || level < 0 || level > 2 {
			err = badRequest("query.level", "Input should be 0, 1 or 2, got "+text)
		}
	}
	if err == nil {
		tags := []string{"weights", "kv_cache"}
		if level == 0 {
			tags = []string{"scheduling"}
		}
		err = s.stopEngines(r.Context(), mode, level > 0, func(p *pauseState) { p.level, p.asleep = level, tags })
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, fmt.Sprintf(`{"status":"sleeping","level":%d}`, level))
}

// postWakeUp wakes what the tags name, all without any. An engine of which all is awake goes on, also after a pause.
func (s *Server) postWakeUp(w http.ResponseWriter, r *http.Request) {
	tags := r.URL.Query()["tags"]
	status := "awake"
	s.restartEngines(func(p *pauseState) {
		p.asleep = slices.DeleteFunc(slices.Clone(p.asleep), func(tag string) bool {
			return len(tags) == 0 || slices.Contains(tags, tag)
		})
		if p.paused = p.paused && len(p.asleep) > 0; len(p.asleep) > 0 {
			status = "sleeping"
		}
	})
	body, _ := json.Marshal(map[string]any{"status": status, "tags": tags}) // strings always marshal
	writeJSON(w, http.StatusOK, body)
}

// getSleeping reports what vLLM does, also of an engine that is paused.
func (s *Server) getSleeping(w http.ResponseWriter, _ *http.Request) {
	state := s.pauseState()
	writeJSON(w, http.StatusOK, `{"is_sleeping":`+strconv.FormatBool(state.isPaused())+`}`)
}
