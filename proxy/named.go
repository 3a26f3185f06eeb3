package proxy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/proxy/admit"
	"warmroute/proxy/fault"
	"warmroute/proxy/modelname"
)

// A request that asks for its model by one of models.names is changed as its name says before it is routed: from then on it
// is as if the client had sent the changed body, but for the models that its key may use.

// namedModel is how a request has asked for its model.
type namedModel struct {
	name         *modelname.Name // nil: by no name
	choice       modelname.Choice
	conversation uint64 // of modelname.Request
	isFirst      bool   // of modelname.Request
	isSingle     bool   // nothing tells the conversation: the request is one of its own
	isDryRun     bool   // nothing is remembered of the choice
}

// nameOr returns the name, or model if there is none.
func (n *namedModel) nameOr(model string) string {
	if n.name == nil {
		return model
	}
	return n.name.Name
}

// model returns the chosen model. There is a name.
func (n *namedModel) model() string { return n.name.Models[n.choice.Model] }

// describe returns what the name stands for, as a sentence.
func (n *namedModel) describe(model string) string {
	return n.name.Name + " stands for " + model + ", " + n.choice.Reason.String() + "."
}

// resolveModel returns the model that a request is for which asks for the given one, empty if it may go to any backend. Where
// the given one is a name, the body and pr become those of a request for its model.
func (r *request) resolveModel(pr *prompt.Prompt, given string) (model string, apiErr *fault.Error) {
	if r.named.name != nil { // the body is that of the changed request
		return r.named.model(), nil
	}
	if given == "" {
		catalog := r.proxy.registry.Catalog()
		if canGoToAnyBackend(catalog, r.endpoint, r.account) {
			return "", nil
		}
		if given, apiErr = r.proxy.defaultModel(catalog, r.account); apiErr != nil {
			return "", apiErr
		}
	}
	n := r.settings.names.Find(given)
	if n == nil {
		return given, nil
	}
	if r.account != nil && !r.account.MayUse(given) {
		return "", r.proxy.unknownModelError(given, r.account)
	}
	r.named.name, r.outcome.ModelName = n, n.Name
	r.named.setConversation(pr, &r.input, r.tenant)
	r.named.choice = r.chooseModel()
	if apiErr := r.changeBody(pr); apiErr != nil {
		return "", apiErr
	}
	return r.named.model(), nil
}

// setConversation sets by what the request's conversation is told from others: the session that it names, whose requests may
// be several conversations, else the beginning of its first message, else all of the body.
func (n *namedModel) setConversation(pr *prompt.Prompt, in *input, t admit.Tenant) {
	id := cmp.Or(in.request.Conversation, pr.Conversation)
	if id == 0 {
		id, n.isFirst = pr.FirstMessageHash, pr.TurnKind() == prompt.TurnFirst
	}
	if id == 0 {
		id, n.isSingle = xxh3.Hash(in.body), true
	}
	n.conversation = admit.NonzeroHash(xxh3.HashStringSeed(t.Key, id))
}

// chooseModel returns the model of the name that serves the request now.
func (r *request) chooseModel() modelname.Choice {
	q := modelname.Request{
		Conversation: r.named.conversation, IsFirst: r.named.isFirst, Now: time.Now(),
		State: func(model string) modelname.State { return r.proxy.stateOfModel(r.settings, model) },
	}
	if r.named.isDryRun || r.named.isSingle {
		return r.proxy.models.Peek(r.named.name, &q)
	}
	return r.proxy.models.Choose(r.named.name, &q)
}

// stateOfModel returns the state of a model of names.
func (p *Proxy) stateOfModel(s *Settings, model string) modelname.State {
	catalog := p.registry.Catalog()
	serving := s.findServingModel(catalog, model)
	switch entry, listed := catalog.Find(serving); {
	case listed && p.router.CountReady(entry.Backends) > 0:
		return modelname.Ready
	case listed, s.StartTimeouts[serving] > 0:
		return modelname.Unready
	}
	return modelname.Unlisted
}

// changeBody changes the body as the name says, for the chosen model, and parses it into pr unless it is a form.
func (r *request) changeBody(pr *prompt.Prompt) *fault.Error {
	in := &r.input
	changes := r.named.name.Changes(r.named.choice.Model)
	var edits []prompt.Edit
	var err error
	if r.endpoint.Multipart {
		edits, err = admit.FormEdits(r.httpReq.Header["Content-Type"], in.body, changes)
	} else {
		edits, err = changes.AppendEdits(nil, r.endpoint.PromptKind, in.body)
	}
	if err != nil {
		return fault.InvalidRequest(admit.AmbiguousFields[err], err.Error())
	}
	limits := admit.BodyLimits{Each: r.settings.BodyBytes, Total: in.limitForPriority(r.settings.BodyBytesTotal)}
	if in.body, err = r.proxy.bodies.Edit(in.body, edits, r.tenant, limits); err != nil {
		return bodyLimitError(err, r.settings.BodyBytes, r.tenant)
	}
	if r.endpoint.Multipart {
		return nil
	}
	return r.parseBody(pr, r.endpoint.PromptKind)
}

// useModel makes the request one for another model of its name.
func (r *request) useModel(choice modelname.Choice) *fault.Error {
	r.named.choice = choice
	pr := r.proxy.pools.prompts.Get().(*prompt.Prompt)
	defer func() {
		pr.Reset()
		r.proxy.pools.prompts.Put(pr)
	}()
	if apiErr := r.changeBody(pr); apiErr != nil {
		return apiErr
	}
	req := &r.input.request
	req.Adapter, req.ContextLengths, req.RefusedLength, req.PrefilledOn = "", backends.ContextLengths{}, 0, nil
	return r.parseInput()
}

// otherModelInterval is the time between two looks whether a request that waits is to be served by another model of its name.
const otherModelInterval = 500 * time.Millisecond

// errOtherModel is the cause of the end of a wait after which the request is for another model of its name.
var errOtherModel = errors.New("another model of the name serves the request")

// mayUseOtherModel reports whether another model of its name may yet serve the request.
func (r *request) mayUseOtherModel() bool {
	n := r.named.name
	return n != nil && len(n.Models) > 1 && r.input.stored.Backend == nil && r.history.kvTransfer == nil
}

// watchOtherModels returns a context that ends with errOtherModel when another model of the request's name is to serve it: its
// own has no ready replica any more. stop ends the watch.
func (r *request) watchOtherModels(ctx context.Context) (watched context.Context, stop func()) {
	n := &r.named
	watched, cancel := context.WithCancelCause(ctx)
	q := modelname.Request{
		Conversation: n.conversation, IsFirst: n.isFirst,
		State: func(model string) modelname.State { return r.proxy.stateOfModel(r.settings, model) },
	}
	name, current := n.name, n.choice.Model
	var timer *time.Timer
	started := make(chan struct{})
	timer = time.AfterFunc(otherModelInterval, func() {
		<-started
		if watched.Err() != nil {
			return
		}
		q.Now = time.Now()
		if q.State(name.Models[current]) != modelname.Ready && r.proxy.models.Peek(name, &q).Model != current {
			cancel(errOtherModel)
			return
		}
		timer.Reset(otherModelInterval)
	})
	close(started)
	return watched, func() {
		timer.Stop()
		cancel(context.Canceled)
	}
}

// chooseModelAgain makes the request one for the model of its name that is to serve it now.
func (r *request) chooseModelAgain() *fault.Error {
	if apiErr := r.useModel(r.chooseModel()); apiErr != nil {
		return apiErr
	}
	r.updateRecording(&r.input)
	r.history.forgetExclusions()
	r.history.queueTimeouts, r.history.noneReadySetting = r.settings.queueTimeoutsOf(r.input.request.CatalogID, &r.caller)
	return nil
}

// ObserveModels records, until ctx is done, which models of names have ready replicas.
func (p *Proxy) ObserveModels(ctx context.Context) {
	ticks := time.NewTicker(otherModelInterval)
	defer ticks.Stop()
	for {
		changed := p.registry.StateChanged() // before looking
		if s := p.settings.Load(); len(s.names.All()) > 0 {
			p.models.Observe(s.names.All(), func(model string) modelname.State { return p.stateOfModel(s, model) }, time.Now())
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-ticks.C:
		}
	}
}

// backendsOfName returns the backends that serve the request's model, or one of the models of its name.
func (r *request) backendsOfName() []*backends.Backend {
	n := r.named.name
	if n == nil || len(n.Models) == 1 {
		return r.input.request.Backends
	}
	return r.settings.backendsOfNamed(r.proxy.registry.Catalog(), n)
}

// useModelOfStored makes a request that refers to a stored response one for the model that has made it, if its name has that. b
// holds the response; nil: none does.
func (r *request) useModelOfStored(b *backends.Backend) *fault.Error {
	n, s := r.named.name, &r.input.stored
	if n == nil || len(n.Models) == 1 || b == nil {
		return nil
	}
	model, known := r.proxy.models.ModelOfResponse(s.ReplicaID, n)
	if !known {
		catalog := r.proxy.registry.Catalog()
		serves := func(i int) bool {
			entry, _ := catalog.Find(r.settings.findServingModel(catalog, n.Models[i]))
			return slices.Contains(entry.Backends, b)
		}
		if serves(r.named.choice.Model) {
			return nil
		}
		model = slices.IndexFunc(n.Models, func(m string) bool { return serves(slices.Index(n.Models, m)) })
		if model < 0 {
			return nil // pinTo says so
		}
	}
	choice := modelname.Choice{Model: model, Reason: modelname.ReasonStored}
	if model == r.named.choice.Model {
		r.named.choice = choice
		return nil
	}
	replicaID := s.ReplicaID
	apiErr := r.useModel(choice)
	s.ReplicaID = replicaID
	return apiErr
}

// findNamed returns a name as a model: the first of its models that a backend serves, with the name as its ID, and the least
// context length of all that are served. ok is false if none is. Its card is that of the model.
func (s *Settings) findNamed(c *backends.Catalog, n *modelname.Name) (m backends.Model, ok bool) {
	for _, model := range n.Models {
		entry, listed := c.Find(s.findServingModel(c, model))
		switch {
		case !listed:
		case !ok:
			m, ok = entry.Model, true
		case entry.MaxTokens > 0 && (m.MaxTokens == 0 || entry.MaxTokens < m.MaxTokens):
			m.MaxTokens = entry.MaxTokens
		}
	}
	m.ID = n.Name
	return m, ok
}

// backendsOfNamed returns the backends that serve one of the models of a name.
func (s *Settings) backendsOfNamed(c *backends.Catalog, n *modelname.Name) (list []*backends.Backend) {
	for _, model := range n.Models {
		entry, _ := c.Find(s.findServingModel(c, model))
		for _, b := range entry.Backends {
			if !slices.Contains(list, b) {
				list = append(list, b)
			}
		}
	}
	return list
}

// cardOf returns the card by which GET /v1/models lists a model of visibleModels. That of a name is the card of its model with the
// name and the context length.
func (p *Proxy) cardOf(m *backends.Model) []byte {
	if p.settings.Load().names.Find(m.ID) == nil {
		return m.Card
	}
	id, _ := json.Marshal(m.ID) // a string has no error
	changes := prompt.Changes{Set: []prompt.Member{{Name: "id", Value: string(id)}}}
	if m.MaxTokens > 0 {
		changes.Set = append(changes.Set, prompt.Member{Name: "max_model_len", Value: strconv.Itoa(m.MaxTokens)})
	}
	edits, err := changes.AppendEdits(nil, prompt.Other, m.Card)
	if err != nil {
		return append(append([]byte(`{"object":"model","id":`), id...), '}')
	}
	return prompt.AppendEdited(nil, m.Card, edits)
}
