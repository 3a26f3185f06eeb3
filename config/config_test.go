package config

import (
	"reflect"
	"testing"
	"time"

	"warmroute/router/policy"
)

// TestSettingsReachComponents sets every setting and checks that no field of what the
// components are given is left out.
func TestSettingsReachComponents(t *testing.T) {
	var c Config
	fill(reflect.ValueOf(&c).Elem())
	c.Tenant, c.Registration.Listener = "isolate", "public"
	c.Routing.Learn, c.Disaggregation.Fallback = false, "queue"
	proxySettings, routerSettings := c.ProxySettings(0, 0), c.RouterSettings()
	routerSettings.PolicySettings.AttentionCost = 1 // of replay only
	proxySettings.QueueTimeouts.Total = 1           // of keys only
	for name, settings := range map[string]any{"proxy": proxySettings, "router": routerSettings, "key": c.APIKeys()[0]} {
		for _, path := range zeroFields(reflect.ValueOf(settings), name) {
			t.Errorf("%s is not set", path)
		}
	}
	want := policy.Settings{
		AttentionCost: 1, ClientAffinity: true, MatchRatio: 1, MatchTokens: 1, ImbalanceAbs: 1, ImbalanceRatio: 1, LoadFactor: 1,
		EvictionThreshold: 1, EvictionTarget: 1, EvictionInterval: 1,
	}
	if got := routerSettings.PolicySettings; got != want {
		t.Errorf("settings of the policy: got %+v, want %+v", got, want)
	}
}

// fill sets every setting of a struct, and of those in it, to a value that is not zero.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(1, 0)))
			return
		}
		for i := range v.NumField() {
			if field := v.Type().Field(i); field.IsExported() && field.Tag.Get("mapstructure") != "-" {
				fill(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("x"), reflect.ValueOf("x"))
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Float64:
		v.SetFloat(1)
	}
}

// zeroFields returns the paths of the exported fields that are zero.
func zeroFields(v reflect.Value, path string) (paths []string) {
	if v.Kind() != reflect.Struct || v.Type() == reflect.TypeFor[time.Time]() {
		if v.IsZero() {
			paths = append(paths, path)
		}
		return paths
	}
	for i := range v.NumField() {
		if field := v.Type().Field(i); field.IsExported() {
			paths = append(paths, zeroFields(v.Field(i), path+"."+field.Name)...)
		}
	}
	return paths
}

func TestFallbackWithoutQueue(t *testing.T) {
	for requests, want := range map[string]bool{"0": false, "10": true} {
		c := mustLoad(t, "backends: [http://a:1]\nrouting: {queue: {requests: "+requests+"}}\ndisaggregation: {fallback: queue}")
		if proxy, router := c.ProxySettings(0, 0).QueueForRoles, c.RouterSettings().Disaggregation.Queue; proxy != want || router != want {
			t.Errorf("a queue of %s requests: the proxy waits %v, the router %v", requests, proxy, router)
		}
	}
}
