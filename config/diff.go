package config

import (
	"reflect"
	"strings"
)

// Diff returns the paths of the settings in which two configurations differ:
// those that a reload applies and those that need a restart. Values are left
// out, since some are secret.
func Diff(a, b *Config) (reloadable, restart []string) {
	var d diff
	d.addDifferences(reflect.ValueOf(*a), reflect.ValueOf(*b), "", false)
	return d.reloadable, d.restart
}

type diff struct{ reloadable, restart []string }

// addDifferences adds the fields in which two structs differ. path is the path of the
// structs; restart is whether all of their fields need one.
func (d *diff) addDifferences(a, b reflect.Value, path string, restart bool) {
	for i := range a.NumField() {
		field := a.Type().Field(i)
		name, option, _ := strings.Cut(field.Tag.Get("mapstructure"), ",")
		if !field.IsExported() || name == "-" {
			continue
		}
		restart := restart || field.Tag.Get("reload") == "no"
		switch {
		case option == "squash":
			d.addDifferences(a.Field(i), b.Field(i), path, restart)
		case field.Type.Kind() == reflect.Struct:
			d.addDifferences(a.Field(i), b.Field(i), path+name+".", restart)
		case reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()):
		case restart:
			d.restart = append(d.restart, path+name)
		default:
			d.reloadable = append(d.reloadable, path+name)
		}
	}
}

// CheckNotWeakened returns an Errors if c drops a protection that old has: the
// API keys, the admin token or the isolation of tenants. A truncated file looks
// like that, because the defaults are open; so a reload refuses it, and a restart
// is needed to apply it.
func (c *Config) CheckNotWeakened(old *Config) error {
	const restart = "; if this is intended, restart or hand over to a new process"
	var errs errorList
	if len(old.Keys) > 0 && len(c.Keys) == 0 {
		errs.add("keys", "refusing to remove all keys: access would become open%s", restart)
	}
	if old.AdminToken != "" && c.AdminToken == "" {
		errs.add("admin_token", "refusing to remove the admin token: admin access would become open%s", restart)
	}
	if old.Tenant == "isolate" && c.Tenant != "isolate" {
		errs.add("tenant", "refusing to end the isolation of tenants: routing would reveal what others sent%s", restart)
	}
	return errs.err()
}
