package sim

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
)

const maxAdapters = 1000

// adapters are the LoRA adapters of a replica in the order of loading.
type adapters struct {
	mu     sync.Mutex
	list   []adapter // replaced, never modified
	lastID int       // the highest id so far
}

type adapter struct {
	id         int // from 1 on
	name, path string
}

// loaded returns the adapters, which the caller must not modify.
func (a *adapters) loaded() []adapter {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.list
}

// find returns the adapter of that name; the zero value if it is not loaded.
func (a *adapters) find(name string) adapter {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := a.indexOf(name); i >= 0 {
		return a.list[i]
	}
	return adapter{}
}

// loadAdapter handles POST /v1/load_lora_adapter as vLLM does with
// VLLM_ALLOW_RUNTIME_LORA_UPDATING.
func (s *Server) loadAdapter(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil && in["lora_name"].Str == s.cfg.Model {
		err = badAdapter(fmt.Sprintf("The lora adapter '%s' conflicts with a served base model.", s.cfg.Model))
	}
	if err == nil {
		err = s.adapters.load(in["lora_name"].Str, in["lora_path"].Str, in["load_inplace"].Bool())
	}
	if err != nil {
		writeError(w, err)
		return
	}
	fmt.Fprintf(w, "Success: LoRA adapter '%s' added successfully.", in["lora_name"].Str)
}

// load adds an adapter. It fails if name is loaded, unless inPlace.
func (a *adapters) load(name, path string, inPlace bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := a.indexOf(name)
	switch {
	case name == "" || path == "":
		return badAdapter("Both 'lora_name' and 'lora_path' must be provided.")
	case at >= 0 && !inPlace:
		return badAdapter(fmt.Sprintf("The lora adapter '%s' has already been loaded. "+
			"If you want to load the adapter in place, set 'load_inplace' to True.", name))
	case len(a.list) >= maxAdapters:
		return badAdapter(fmt.Sprintf("no more than %d adapters can be loaded", maxAdapters))
	}
	list := slices.Clone(a.list)
	if at >= 0 {
		list = slices.Delete(list, at, at+1)
	}
	a.lastID++
	a.list = append(list, adapter{a.lastID, name, path})
	return nil
}

// unloadAdapter handles POST /v1/unload_lora_adapter. Requests in flight continue.
func (s *Server) unloadAdapter(w http.ResponseWriter, r *http.Request) {
	in, err := readBody(r)
	if err == nil {
		err = s.adapters.unload(in["lora_name"].Str)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	fmt.Fprintf(w, "Success: LoRA adapter '%s' removed successfully.", in["lora_name"].Str)
}

func (a *adapters) unload(name string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if name == "" {
		return badAdapter("'lora_name' needs to be provided to unload a LoRA adapter.")
	}
	at := a.indexOf(name)
	if at < 0 {
		return apiError{status: http.StatusNotFound, kind: "NotFoundError",
			message: fmt.Sprintf("The lora adapter '%s' cannot be found.", name)}
	}
	a.list = slices.Delete(slices.Clone(a.list), at, at+1)
	return nil
}

// indexOf returns the index of the named adapter in list, or -1. It requires mu.
func (a *adapters) indexOf(name string) int {
	return slices.IndexFunc(a.list, func(b adapter) bool { return b.name == name })
}

func badAdapter(message string) apiError {
	return apiError{status: http.StatusBadRequest, kind: "InvalidUserInput", message: message}
}
