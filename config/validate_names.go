package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"warmroute/prompt"
	"warmroute/proxy/modelname"
)

const (
	maxModelNames      = 256 // metrics have series for each
	maxModelNameBytes  = 256
	maxModelNameWeight = 1_000_000
	maxSetBytes        = 64 << 10 // each request of the name is longer by them
)

// memberName matches the names of members that a form can have as well.
var memberName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// unsettableMembers are those that say what a request is, which model serves it, or who may read what from where.
var unsettableMembers = append([]string{
	"model", "messages", "prompt", "input", "token_ids", "file", "stream", "previous_response_id", "request_id",
}, prompt.TransferParamNames[:]...)

func (c *Config) validateModelNames(errs *errorList) {
	names := c.Models.Names
	if len(names) > maxModelNames {
		errs.add("models.names", "%d names are too many; the maximum is %d", len(names), maxModelNames)
		return
	}
	if errs.hasAny("models.names") {
		return
	}
	for i, n := range names {
		at := fmt.Sprintf("models.names[%d]", i)
		if errs.hasAny(at) {
			continue // it could not be read
		}
		validateTags(errs, n, at+".")
		c.validateModelName(errs, at, i)
		c.validateNamedModels(errs, at, &n)
		validateSet(errs, at, &n)
	}
}

// validateModelName validates the name of models.names[i], at that path.
func (c *Config) validateModelName(errs *errorList, at string, i int) {
	name := c.Models.Names[i].Name
	at += ".name"
	first := slices.IndexFunc(c.Models.Names, func(o ModelName) bool { return o.Name == name })
	pattern, matches := c.Models.matchPattern(name)
	switch {
	case name == "":
		errs.add(at, "is missing; give the name by which clients ask for the model")
	case len(name) > maxModelNameBytes:
		errs.add(at, "has %d bytes; the maximum is %d", len(name), maxModelNameBytes)
	case !IsHeaderValue(name) || strings.TrimSpace(name) != name:
		errs.add(at, "%q must be visible ASCII, without spaces at its ends", name)
	case first < i:
		errs.add(at, "%s is already models.names[%d]; remove one of the two", name, first)
	case slices.ContainsFunc(c.StartHooks, func(h StartHook) bool { return h.Model == name }):
		errs.add(at, "%s is a model itself, by start_hooks; choose another name", name)
	case slices.Contains(slices.Collect(maps.Values(c.Models.Patterns)), name):
		errs.add(at, "%s is a model itself, by models.patterns; choose another name", name)
	case matches:
		errs.add(at, "%s is an adapter by the pattern %q in models.patterns; choose another name", name, pattern)
	}
}

// validateNamedModels validates the models of a name, at that path, and how one of them is chosen.
func (c *Config) validateNamedModels(errs *errorList, at string, n *ModelName) {
	switch {
	case n.Model == "" && len(n.Models) == 0:
		errs.add(at, "has no model; set model, or models")
	case n.Model != "" && n.Models != nil:
		errs.add(at, "has both model and models; remove one of the two")
	case len(n.Models) > modelname.MaxModels:
		errs.add(at+".models", "%d models are too many; the maximum is %d", len(n.Models), modelname.MaxModels)
	}
	for k, model := range n.AllModels() {
		path := at + ".model"
		if n.Model == "" {
			path = fmt.Sprintf("%s.models[%d]", at, k)
		}
		switch {
		case model == "":
			errs.add(path, "is empty; name a model of the replicas")
		case slices.Index(n.AllModels(), model) < k:
			errs.add(path, "%s is given twice; remove one of the two", model)
		case slices.ContainsFunc(c.Models.Names, func(o ModelName) bool { return o.Name == model }):
			errs.add(path, "%s is a name of models.names itself; name the model that it stands for", model)
		}
	}
	if n.Weights == nil {
		return
	}
	sum := 0
	for k, weight := range n.Weights {
		if sum += max(weight, 0); weight < 0 || weight > maxModelNameWeight {
			errs.add(fmt.Sprintf("%s.weights[%d]", at, k), "%d is not between 0 and %d", weight, maxModelNameWeight)
		}
	}
	switch {
	case len(n.Weights) != len(n.Models):
		errs.add(at+".weights", "has %d weights for %d models; give each of models one", len(n.Weights), len(n.Models))
	case sum == 0:
		errs.add(at+".weights", "are all 0; give at least one of models another weight")
	}
}

// validateSet validates the members that a name, at that path, sets in bodies.
func validateSet(errs *errorList, at string, n *ModelName) {
	size := 0
	for _, m := range n.members() {
		size += len(m.Name) + len(m.Value)
		path := at + ".set." + m.Name
		switch {
		case !memberName.MatchString(m.Name):
			errs.add(at+".set", "%q is not the name of a member such as temperature", m.Name)
		case m.Name == "model":
			errs.add(path, "is set by model and models; remove it here")
		case slices.Contains(unsettableMembers, m.Name):
			errs.add(path, "is the client's to set; remove it")
		case n.MaxOutputTokens > 0 && slices.Contains(prompt.OutputLimitNames[:], m.Name):
			errs.add(path, "is limited by max_output_tokens; remove one of the two")
		}
	}
	if size > maxSetBytes {
		errs.add(at+".set", "has %d bytes as JSON; the maximum is %d", size, maxSetBytes)
	}
}

// fallbackWarnings returns the warnings about names for whose models requests cannot wait for fallback_after.
func (c *Config) fallbackWarnings() (warnings []string) {
	q := &c.Routing.Queue
	for i, n := range c.Models.Names {
		at := fmt.Sprintf("models.names[%d].fallback_after: %v", i, n.FallbackAfter)
		switch {
		case len(n.Models) < 2 || n.FallbackAfter == 0:
		case q.Requests == 0:
			warnings = append(warnings, at+" while the admission queue is off (routing.queue.requests): for that time requests get a 503 "+
				"before another model serves them; set it to 0s, or turn the queue on")
		case n.FallbackAfter >= q.NoneReadyTimeout:
			warnings = append(warnings, fmt.Sprintf("%s is not below routing.queue.none_ready_timeout %v: requests get a 503 before another "+
				"model serves them; lower it, or raise the other", at, q.NoneReadyTimeout))
		}
	}
	return warnings
}

// AllModels returns the models that the name stands for: Model, or else Models.
func (n *ModelName) AllModels() []string {
	if n.Model != "" {
		return []string{n.Model}
	}
	return n.Models
}

// members returns what the name sets in bodies, by name.
func (n *ModelName) members() (list []prompt.Member) {
	for _, name := range slices.Sorted(maps.Keys(n.Set)) {
		var value bytes.Buffer
		e := json.NewEncoder(&value)
		e.SetEscapeHTML(false)
		_ = e.Encode(n.Set[name]) // checkMembers has found that it can be
		list = append(list, prompt.Member{Name: name, Value: strings.TrimSuffix(value.String(), "\n")})
	}
	return list
}

// modelNames returns the names in the form in which the proxy uses them. The configuration must be valid.
func (m *Models) modelNames() (list []modelname.Settings) {
	for i := range m.Names {
		n := &m.Names[i]
		list = append(list, modelname.Settings{
			Name: n.Name, Models: n.AllModels(), Weights: n.Weights, FallbackAfter: n.FallbackAfter, Set: n.members(),
			MaxOutputTokens: n.MaxOutputTokens,
		})
	}
	return list
}
